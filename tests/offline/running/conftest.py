"""Ray, for the tests of runs on several processes."""

import pytest

from replaylake.offline.running.local_ray import open_ray


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of a file: it takes seconds to start."""
    with open_ray("tests", 2) as ray:
        yield ray
