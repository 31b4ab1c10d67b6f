"""Export: snapshots and selections written out in other people's formats."""
