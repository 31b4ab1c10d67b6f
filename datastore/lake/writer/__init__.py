"""EpisodeWriter: episodes and their pieces into commits, each accounted for."""
