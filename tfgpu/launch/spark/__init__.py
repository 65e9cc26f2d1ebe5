"""What `spark_job` is made of: who gets which rows, how they travel, and predictions over a DataFrame."""
