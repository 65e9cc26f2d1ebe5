"""Users and passwords in addresses: `https://user:password@machine/`."""

# A password may have a `/` that is not written as `%2F`. A database's address has no `@` behind its machine but in a
# query; in a page's, what ends as one does is the machine, and digits before the `/` are a port (`host:8080/x@y`).
_DATABASES = (
    r"postgres|mysql|maria|mongodb|redis|valkey|amqp|mssql|sqlserver|oracle|clickhouse|snowflake|redshift|cockroach"
    r"|ldap|smtp|imap|nats|kafka|neo4j|bolt|memcache|influx|cassandra|scylla|trino|presto|hive|vertica|db2|duckdb"
)
_URL = r"(?:(?!://)[^\s\"'<>])"
CREDENTIALS = (
    rf"(?P<database>\b(?i:{_DATABASES})[\w+]*://)(?=[^\s/@\[])[^\s/@:\"'<>]*+:(?:(?!\?[\w.\-]++=){_URL})*@(?=[^\s/])"
    r"|(?<=://)(?=[^\s/@])[^\s/@:\"'<>]*+(?::[^\s/\"'<>]*)?@(?=[^\s/])"
    rf"|(?<=://)(?<!file://)[^\s/@:\"'<>\[]++:(?!\d{{1,5}}/){_URL}*?@(?=[\w.\-\[]++(?:[/:?#\s\"'<>,;)\]]|\Z))"
    r"|(?i:(?<=%3A%2F%2F))(?:(?!%2[Ff]|%3[Ff])[^\s\"'<>&=])*?%40(?=\w)"
)
