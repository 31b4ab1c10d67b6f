"""Import: policies that other libraries trained, converted into policy packages."""
