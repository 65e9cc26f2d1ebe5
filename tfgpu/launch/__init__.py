"""Starting the processes of a cluster, on whichever engine; stdlib only, an engine's library is imported when used."""
