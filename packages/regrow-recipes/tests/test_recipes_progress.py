"""The line of a step: what it has, when it comes, and that no peak of a device is guessed."""

from collections.abc import Iterable

import pytest

from regrow_recipes.recipes.progress import Progress, peak_of, span

NUMBERS = {"loss": 2.5, "grad_norm": 0.75, "tokens": 7.0}


def progress(
    times: Iterable[float], *, steps: int = 100, every: int = 10, device: str = "", half: bool = True, memory: int = 0
) -> Progress:
    clock = iter(times)
    return Progress(
        steps=steps,
        tokens=20_000,
        flops=5e9,
        every=every,
        device=device,
        half=half,
        clock=lambda: next(clock),
        memory=(lambda: memory) if memory else None,
    )


def lines(made: Progress, *numbers: int, world: int = 2) -> list[str]:
    return [made.line(number, NUMBERS, lr=3e-4, world=world) for number in numbers]


def test_a_line_on_processors_has_all_but_mfu() -> None:
    first, *quiet, tenth = lines(progress([0.0, 0.0, 18.0]), *range(10))
    assert first == "step 1/100  loss 2.5  grad_norm 0.75  lr 0.0003"
    assert quiet == [""] * 8
    # 9 steps in 18 s: 10,000 tokens a second, 5e13 FLOP/s, on two ranks; 90 steps are left.
    assert tenth == (
        "step 10/100  loss 2.5  grad_norm 0.75  lr 0.0003  10,000 tokens/s  25 TFLOP/s a rank  3min 00s left"
    )


def test_on_a_device_whose_peak_is_known_there_is_mfu_and_memory() -> None:
    made = progress([0.0, 0.0, 1.0], device="NVIDIA H100 80GB HBM3", memory=61_200_000_000)
    _, line = lines(made, 0, 9)
    # 1.8e5 tokens of 5e9 FLOPs in a second, by two ranks, of 989e12.
    assert "450 TFLOP/s a rank  MFU 45.5%  61.2 GB at most  " in line


@pytest.mark.parametrize(
    ("device", "half"), [("", True), ("", False), ("AMD EPYC 9654", True), ("Some GPU", True), ("NVIDIA H100", False)]
)
def test_no_peak_is_guessed(device: str, half: bool) -> None:
    _, line = lines(progress([0.0, 0.0, 1.0], device=device, half=half), 0, 9)
    assert "TFLOP/s" in line and "MFU" not in line


def test_the_last_step_has_its_line_and_nothing_is_left() -> None:
    *_, last = lines(progress([0.0, 0.0, 6.0], steps=4), 0, 1, 2, 3)
    assert last.startswith("step 4/4  ") and "10,000 tokens/s" in last and "left" not in last


def test_a_newcomer_counts_from_the_step_at_which_it_came() -> None:
    made = progress([100.0, 102.0])
    assert lines(made, 57, 58) == ["", ""]
    assert "20,000 tokens/s" in made.line(59, NUMBERS, lr=1e-4, world=2), "two steps in 2 s"


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12)],
)
def test_the_first_name_that_fits_counts(name: str, peak: float) -> None:
    assert peak_of(name) == peak


def test_spans_are_told_as_people_do() -> None:
    assert [span(seconds) for seconds in (0.4, 59.6, 200, 3_725)] == ["0s", "1min 00s", "3min 20s", "1h 02min"]
