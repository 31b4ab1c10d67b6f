"""The files of others that the explorer serves are those that their notices name."""

import hashlib
from importlib.resources import files

_STATIC = files("replaylake.serve.explorer").joinpath("static")


def test_vendored_files_are_unchanged_and_named():
    notices = _STATIC.joinpath("LICENSES.txt").read_text()
    assert "uPlot 1.6.32" in notices
    assert "The MIT License (MIT)" in notices
    assert "uPlot (v1.6.32)" in _STATIC.joinpath("uplot.js").read_text()[:100]
    digests = {
        name: hashlib.sha256(_STATIC.joinpath(name).read_bytes()).hexdigest()
        for name in ("uplot.js", "uplot.css")
    }
    # Of the files in the npm package uplot-1.6.32.tgz.
    assert digests == {
        "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
