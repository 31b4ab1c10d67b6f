"""LeRobot: folders of Parquet and metadata, with videos as references."""
