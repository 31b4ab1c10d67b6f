"""HTML, tables and charts of the explorer, policy servers and `show --report`; no Starlette."""
