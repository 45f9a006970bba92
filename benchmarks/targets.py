"""Targets of the benchmarks in one table, and the common end of each benchmark.

A missed target is printed as missed and listed under `missed` in the JSON; the exit code stays 0, so that the figures
are always readable. A benchmark that could not measure ends with 1.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """A bound of a figure.

    Attributes:
        figure: its name in the JSON.
        most: upper bound; None: there is none.
        least: lower bound; None: there is none.
        of: a figure of the same run by which the bound is multiplied; empty: the bound is a number.
    """

    figure: str
    most: float | None = None
    least: float | None = None
    of: str = ""

    def judge(self, figures: Figures) -> tuple[bool, str] | None:
        """Compare the figure with its bound; returns the verdict and a sentence, or None if it was not measured."""
        if self.figure not in figures or (self.of and self.of not in figures):
            return None
        value, base = figures[self.figure], figures[self.of] if self.of else 1.0
        met = (self.most is None or value <= self.most * base) and (self.least is None or value >= self.least * base)
        bounds = [("at most", self.most), ("at least", self.least)]
        said = " and ".join(f"{word} {bound * base:.4g}" for word, bound in bounds if bound is not None)
        why = f" ({self.most if self.most is not None else self.least:g} of {self.of} {base:.4g})" if self.of else ""
        return met, f"{self.figure} {value:.4g}, {said}{why}"


TARGETS: Mapping[str, tuple[Target, ...]] = {
    "accelerator": (
        Target("step_over_plain", most=1.02),
        Target("drains_a_step", most=1),
        Target("silent_differences", most=0),
    ),
    "batch": (Target("rows_per_s", least=2_000), Target("peak_mib", most=500)),
    "batch_vllm": (Target("of_run_batch", least=0.95), Target("equal_answers", least=1)),
    "chaos": (
        Target("goodput", least=0.97),
        Target("steps_lost", most=0),
        Target("bitwise_equal", least=1),
        Target("left_behind", most=0),
    ),
    "collectives": tuple(
        Target(f"mesh_{ranks}_{size}_ms", most=1.0, of=f"gloo_{ranks}_{size}_ms")
        for ranks in (2, 4, 8, 16)
        for size in ("1kb", "1mb", "100mb")
    ),
    "control_plane": (Target("abort_s_5000", most=1.0),),
    "data": (
        *(Target(f"first_batch_s_{step}", most=0.020) for step in (10, 1_000, 100_000)),
        *(
            Target(f"throughput_over_dataloader{kind}", least=1.0 if "transform" not in kind else 0.95)
            for kind in ("", "_2_ranks", "_4_ranks", "_transform", "_transform_2_ranks")
        ),
        Target("bytes_8_ranks_over_1", most=1.25),
        Target("copied_batches", most=0),
    ),
    "elastic": (
        Target("grow_pause_s", most=1.0, of="grow_target_s"),
        Target("shrink_pause_s", most=0.2),
        *(Target(f"throughput_ratio_{world}", least=0.9 * world) for world in (2, 3, 4)),
    ),
    "endurance": (
        Target("steps_again", most=0),
        Target("bitwise_equal", least=1),
        *(
            Target(f"{name}_growth", most=0.01)
            for name in (
                "memory_mb",
                "descriptors",
                "threads",
                "processes",
                "shared_files",
                "records_a_step",
                "step_time",
            )
        ),
    ),
    "hydration": tuple(
        target
        for size in ("", "_0.1gb", "_1gb", "_4gb")
        for target in (
            Target(f"gbps_1_holder{size}", least=0.7, of=f"gbps_socket{size}"),
            Target(f"gbps_4_flows{size}", least=0.9, of=f"gbps_socket_4_flows{size}"),
            Target(f"beyond_holder_mib{size}", most=256),
            Target(f"beyond_receiver_mib{size}", most=256),
        )
    ),
    "grpo": (
        Target("final_reward_recipe", least=0.95, of="final_reward_plain"),
        Target("updates_alike", least=3),
    ),
    "live_page": (
        Target("updates_per_s", least=10),
        Target("page_errors", most=0),
        Target("requests_elsewhere", most=0),
    ),
    "lz": (
        Target("exact_loops_none", least=10),
        Target("exact_loops_lz", most=0),
        Target("degenerate_lz", most=0.1),
        Target("cost_over_hf_b8", most=1.0),
        Target("cost_over_hf_b64", most=1.0),
        Target("arrivals_1024_ms", most=10.0),
        Target("idle_us", most=10.0),
        Target("after_burst_ratio", most=1.2),
    ),
    "operator": (
        Target("resync_s", most=2.0),
        Target("reaction_s", most=0.2),
        Target("rss_mib", most=200),
        Target("capacity_s", most=5.0),
    ),
    "reading": (Target("busy_over_idle", least=0.6),),
    "peers": (
        *(
            Target(f"{figure}_regrow_standby", most=most, least=least)
            for figure, most, least in (("time", 1.05, None), ("survived", None, 3), ("difference", 0, 0))
        ),
        *(
            Target("time_regrow_standby", most=1.0, of=f"time_{peer}")
            for peer in ("torchrun", "nvrx_launcher", "nvrx_inprocess", "torchft")
        ),
    ),
    "recipes": tuple(Target(f"recipe_over_plain_{method}", most=1.02) for method in ("pretrain", "lora")),
    "rendezvous": (
        Target("init_s_64", most=1.0, of="tcpstore_init_s_64"),
        Target("init_s_64", most=1.0, of="tcpstore_lazy_init_s_64"),
        Target("eager_init_s_64", most=1.0, of="tcpstore_init_s_64"),
        Target("form_bytes_a_rank_4096", least=0.8, most=1.2, of="form_bytes_a_rank_1024"),
    ),
    "moves": (
        Target("steps_again", most=0),
        Target("bitwise_equal", least=1),
        *(Target(f"move_pause_s_{size}", most=0.1) for size in ("30mb", "300mb", "3gb")),
    ),
    "recovery": (
        Target("steps_redone", most=0),
        Target("not_recovered", most=0),
        Target("audit_percent", most=0.5),
        Target("proof_percent", most=0.5),
    ),
    "short_jobs": (
        Target("start_s_beyond_script", most=2.0),
        Target("teardown_s", most=1.0),
        Target("jobs_at_once_20_failed", most=0),
        Target("jobs_disturbed", most=0),
        Target("incidents_of_struck", least=1),
    ),
    "slurm_submit": (Target("submit_to_first_step_s", most=15.0),),
    "simulator": (
        Target("large_s", most=600),
        Target("large_mib", most=4_096),
        Target("demo_error_most", most=0.2),
    ),
}
"""Targets by benchmark."""


def missed(benchmark: str, figures: Figures) -> Iterator[str]:
    """One sentence for each missed target."""
    for target in TARGETS.get(benchmark, ()):
        verdict = target.judge(figures)
        if verdict is not None and not verdict[0]:
            yield verdict[1]


def tell(benchmark: str, figures: Figures, path: Path | None, **details: object) -> None:
    """Print each target as met or missed, and write the figures.

    Args:
        benchmark: its name.
        figures: measured values, by name.
        path: of the JSON file; None: none is written.
        **details: other entries of the JSON.
    """
    for target in TARGETS.get(benchmark, ()):
        verdict = target.judge(figures)
        if verdict is not None:
            print(f"{'met   ' if verdict[0] else 'missed'}  {verdict[1]}")
    if path is not None:
        told = {"figures": dict(figures), "missed": list(missed(benchmark, figures)), **details}
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def warn_if_busy() -> None:
    """Print a warning if other load slows the machine down."""
    cores, (load, _, _) = os.cpu_count() or 1, os.getloadavg()
    if load > cores / 2:
        print(f"the machine is busy (load {load:.1f} on {cores} cores): everything will look slower than it is")
