"""What SQL finds beside a dataset's own views: lake-wide relations, datasets at other versions."""
