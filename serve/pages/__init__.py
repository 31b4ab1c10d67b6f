"""HTML, tables and charts of pages, for the explorer and `show --report`; without Starlette."""
