import shutil

import pytest

from replaylake.datastore.lake import open_lake
from replaylake.online.shipment import Order, ShippingWorker
from replaylake.online.worker import ActingPolicy, RolloutConfig


@pytest.mark.parametrize("on", ["folder", "s3"])
def test_a_worker_finds_the_package_where_the_drivers_copy_is_not(
    request, tmp_path, toys, loaded_die, on
):
    url = str(tmp_path / "lake")
    if on == "s3":
        url = f"s3://{request.getfixturevalue('bucket')}/lake"
    lake = open_lake(url, create=True)
    lake.registry.register("die", loaded_die, run_id="test", lineage={})
    shutil.rmtree(loaded_die)
    elsewhere = ActingPolicy("die", 1, tmp_path / "on another machine")
    order = Order(lake.url, "d", "p", 0, range(2), elsewhere, RolloutConfig(f"{toys}:any"))
    assert ShippingWorker(order)._acting().load(None).spec.head == "categorical"
    assert ShippingWorker(order)._acting().version == 1
