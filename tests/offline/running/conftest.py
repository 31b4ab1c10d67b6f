"""Ray, for the tests of runs on several processes."""

import pytest

from replaylake.offline.running.local_ray import import_ray


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of a file: it takes seconds to start."""
    ray = import_ray("tests")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield ray
    ray.shutdown()
