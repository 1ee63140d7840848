"""Which boards CUDA shows, and which board a CUDA device is."""

from __future__ import annotations

import pytest

from energylens.errors import MeterError
from energylens.meter.base import DeviceInfo
from energylens.meter.nvml import match_cuda, visible_devices

A = DeviceInfo(
    uuid="GPU-aaaa1111-0000-4000-8000-000000000001",
    name="NVIDIA H200",
    pci_bus_id="00000000:1B:00.0",
)
B = DeviceInfo(
    uuid="GPU-aaaa2222-0000-4000-8000-000000000002",
    name="NVIDIA H200",
    pci_bus_id="00000000:43:00.0",
)
C = DeviceInfo(
    uuid="GPU-cccc3333-0000-4000-8000-000000000003",
    name="NVIDIA H200",
    pci_bus_id="00000001:0A:00.0",
)
OLD = DeviceInfo(
    uuid="GPU-dddd4444-0000-4000-8000-000000000004",
    name="NVIDIA T4",
    pci_bus_id="00000000:05:00.0",
)
BOARDS = (A, B, C)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0", (A,)),
        ("2,0", (C, A)),
        (" 0, 1 ", (A, B)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (A,)),
        ("0,7,1", (A,)),
        ("0,x,1", (A,)),
        ("0,0", ()),
        ("1gpu,+2", (B, C)),
        (A.uuid, (A,)),
        (f"{C.uuid},{A.uuid}", (C, A)),
        ("GPU-cccc", (C,)),
        ("GPU-aaaa2", (B,)),
        ("GPU-aaaa", ()),  # ambiguous
        ("GPU-cccc,GPU-ffff,GPU-aaaa1", (C,)),
        ("GPU-cccc,0", (C,)),
        (f"GPU-cccc,{C.uuid}", ()),
        ("NoDevFiles", ()),
    ],
)
def test_b43_cuda_visible_devices_is_read_as_cuda_reads_it(value, shown):
    assert visible_devices(BOARDS, {"CUDA_VISIBLE_DEVICES": value}) == shown


def test_b37_only_the_visible_board_of_eight_is_used():
    eight = tuple(DeviceInfo(uuid=f"GPU-{i:04d}", name="NVIDIA H200") for i in range(8))
    assert visible_devices(eight, {"CUDA_VISIBLE_DEVICES": "0"}) == eight[:1]
    assert visible_devices(eight, {}) == eight
    assert visible_devices(eight, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == eight[4:]  # B34


@pytest.mark.parametrize(
    "mig_id", ["MIG-8e9b1c2d-0000-5000-9000-0000000000aa", "MIG-GPU-aaaa1111/7/0"]
)
def test_b35_b43_mig_ids_are_kept_and_marked(mig_id):
    (shown,) = visible_devices(BOARDS, {"CUDA_VISIBLE_DEVICES": mig_id})
    assert shown.uuid == mig_id
    assert shown.mig


def test_a_known_mig_slice_keeps_the_name_of_its_board():
    mig_id = "MIG-8e9b1c2d-0000-5000-9000-0000000000aa"
    board = DeviceInfo(uuid="GPU-1", name="NVIDIA H200", mig=True, mig_uuids=(mig_id,))
    (shown,) = visible_devices((board,), {"CUDA_VISIBLE_DEVICES": mig_id})
    assert (shown.uuid, shown.name, shown.mig) == (mig_id, "NVIDIA H200", True)


def test_b42_ordinals_of_different_boards_are_refused_unless_the_order_is_known():
    mixed = (OLD, A)
    with pytest.raises(MeterError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_devices(mixed, {"CUDA_VISIBLE_DEVICES": "0"})
    ordered = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_devices(mixed, ordered) == (OLD,)
    assert visible_devices(mixed, {"CUDA_VISIBLE_DEVICES": A.uuid}) == (A,)
    assert visible_devices(mixed, {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_b40_b41_cuda_order_differs_from_nvml_order():
    nvml_order = (OLD, A)
    torch_prints = [A.uuid.removeprefix("GPU-"), OLD.uuid.removeprefix("GPU-")]
    assert match_cuda(nvml_order, torch_prints) == (A, OLD)


@pytest.mark.parametrize(
    "cuda_id",
    [
        B.uuid,
        B.uuid.removeprefix("GPU-"),
        B.uuid.upper().replace("-", "").removeprefix("GPU"),
        "0000:43:00.0",
        "00000000:43:00.0",
        " 0:43:0.0",
    ],
)
def test_a_board_is_found_by_any_spelling_of_its_uuid_or_bus_id(cuda_id):
    assert match_cuda(BOARDS, [cuda_id]) == (B,)


def test_an_unknown_board_is_one_clear_line():
    with pytest.raises(MeterError, match=r"no board with id '0000:99:00.0'; NVML shows: GPU-aaaa1"):
        match_cuda(BOARDS, ["0000:99:00.0"])
