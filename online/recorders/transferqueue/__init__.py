"""A storage backend of TransferQueue whose samples and state survive crashes; see `backend`."""
