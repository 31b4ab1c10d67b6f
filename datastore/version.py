"""The product's version, written into every lake and policy package."""

from typing import Final

VERSION: Final = "0.2.0.dev0"
