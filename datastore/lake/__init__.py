"""Lake, dataset, snapshot and writers; the catalog, policies and runs."""
