"""Tables: shards and a log, for any Arrow schema; and the files of one version."""
