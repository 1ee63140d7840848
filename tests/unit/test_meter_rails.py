"""Which rails stand for what on each Jetson."""

from __future__ import annotations

import helpers_jetson as fake
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.meter.rails import ROLES, is_known, map_rails, rail_name

BOARDS = {
    "Orin Nano": (fake.ORIN_NANO, 8.0),
    "Nano": (fake.NANO, 5.0),  # B52: the input rail alone, not 8.5 W
    "TX2": (fake.TX2, 9.0),
    "AGX Xavier": (fake.AGX_XAVIER, 17.8),
    "AGX Orin": (fake.AGX_ORIN, 17.0),  # B53: without the child rail
    "AGX Thor": (fake.THOR | {"VIN": 60000.0}, 60.0),
}


@pytest.mark.parametrize("board", BOARDS)
def test_b51_b52_b53_the_total_of_each_board_counts_every_watt_once(board: str) -> None:
    rails, total_w = BOARDS[board]
    found = map_rails(rails)
    assert board in found.boards
    watts = sum(rails[name] for name in found.total.rails) / 1000
    assert watts == pytest.approx(total_w)
    assert found.total.scope == "module"


@pytest.mark.parametrize(
    ("board", "gpu", "shared_with", "memory"),
    [
        ("Orin Nano", ("VDD_CPU_GPU_CV",), ("cpu", "cv"), ()),
        ("Nano", ("POM_5V_GPU",), (), ()),
        ("TX2", ("VDD_SYS_GPU",), (), ("VDD_SYS_DDR",)),
        ("AGX Xavier", ("GPU",), (), ("VDDRQ",)),
        ("AGX Orin", ("VDD_GPU_SOC",), ("soc",), ("VDDQ_VDD2_1V8AO",)),
        ("AGX Thor", ("VDD_GPU",), (), ("VDD_CPU_SOC_MSS",)),
    ],
)
def test_b51_a_shared_rail_is_never_the_gpus_alone(
    board: str, gpu: tuple[str, ...], shared_with: tuple[str, ...], memory: tuple[str, ...]
) -> None:
    found = map_rails(BOARDS[board][0])
    role = found.role("gpu")
    assert (role.rails, role.shared_with) == (gpu, shared_with)
    assert role.scope == ("gpu_shared_rail" if shared_with else "gpu")
    assert found.role("memory").rails == memory
    assert bool(memory) == (found.role("memory").reason is None)


def test_b53_agx_orin_says_what_its_sum_leaves_out() -> None:
    note = map_rails(fake.AGX_ORIN).note or ""
    assert "VDDQ_VDD2_1V8AO" in note
    assert "carrier board" in note


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("VDD_IN", "VDD_IN"),
        ("vdd_in", "VDD_IN"),
        ("ch0: VDD_IN", "VDD_IN"),
        ("CHANNEL_1_VDD_SOC", "VDD_SOC"),
        ("2-VDD_SOC\n", "VDD_SOC"),
        ("VDD_4V0_WIFI", "VDD_4V0_WIFI"),
        ("5V_IN", "5V_IN"),
    ],
)
def test_labels_with_channels_or_in_lower_case_mean_the_same_rail(label: str, name: str) -> None:
    assert rail_name(label) == name


def test_b54_an_unknown_board_goes_by_the_words_of_its_rails_and_is_never_added_up() -> None:
    known = map_rails(["VDD_IN", "VDD_GPU", "VDD_CPU"])  # a TX1
    assert known.total.rails == ("VDD_IN",)
    assert known.role("gpu").rails == ("VDD_GPU",)
    assert not is_known(["VDD_IN", "VDD_GPU", "VDD_CPU"])
    without = map_rails(["VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"])  # a Thor without its VIN
    assert without.total.rails == ()
    assert "no input rail among VDD_GPU, VDD_CPU_SOC_MSS, VIN_SYS_5V0" in (
        without.total.reason or ""
    )
    assert map_rails([]).total.reason == "no input rail among no rail"


def test_a_rail_without_a_name_is_nobodys() -> None:
    found = map_rails(["UNLABELLED_HWMON3_CHANNEL_1", "VDD_IN"])
    assert found.total.rails == ("VDD_IN",)
    assert all(not found.role(role).rails for role in ROLES[1:])


@given(st.lists(st.sampled_from([*fake.TX2, *fake.AGX_ORIN, *fake.AGX_XAVIER, "VIN"]), unique=True))
def test_every_role_has_rails_or_a_reason(names: list[str]) -> None:
    found = map_rails(names)
    assert tuple(r.role for r in found.roles) == ROLES
    for role in found.roles:
        assert bool(role.rails) != bool(role.reason)
        assert set(role.rails) <= set(names)
