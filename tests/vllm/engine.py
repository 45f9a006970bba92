"""A live vLLM engine on CPUs with the penalty in it, in one process: `python -m tests.vllm.engine FOLDER RUNNER KIND`.

The last line of its output is a JSON object: how many outputs were equal to Hugging Face's, and what was checked. What
vLLM switches off on CPUs (asynchronous scheduling) or cannot do there (its draft kernel) is done in its stead.
"""

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER, RUNNER, KIND = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)
if RUNNER == "V2":
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    import triton.backends

    # The interpreter needs no backend, but one that has a name.
    triton.backends.backends["cpu"] = SimpleNamespace(driver=None, compiler=None)

from tests.vllm import checked  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

FEW_BLOCKS = {"num_gpu_blocks_override": 14, "block_size": 32}
SMALL_STEPS = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 20, "block_size": 32}
DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
MORE: dict[str, dict[str, Any]] = {
    "preempt": FEW_BLOCKS,
    "async-preempt": FEW_BLOCKS,
    "chunked": SMALL_STEPS,
    "spec-chunked": DRAFTS | SMALL_STEPS | {"num_gpu_blocks_override": 24},
}


def schedule_asynchronously() -> None:
    """Switch on again what vLLM switches off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config.__func__

    def keep(cls: Any, config: Any) -> None:
        real(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep)


def propose_drafts() -> None:
    """Look drafts up in Python, and spoil some of them, which are to be refused."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    spoil = random.Random(3)

    def propose(self: Any, batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> Any:
        for number in range(batch.num_reqs if not dummy_run else 0):
            slot = int(batch.idx_mapping[number])
            seen = self.req_states.all_token_ids.gpu[slot, : int(self.req_states.total_len.gpu[slot])].tolist()
            at = next(
                (place for place in range(len(seen) - 2, 0, -1) if seen[place - 1 : place + 1] == seen[-2:]), None
            )
            draft = ((seen[at + 1 : at + 4] if at is not None else []) or seen[-1:]) * 3
            draft = draft[: self.num_speculative_steps]
            if spoil.random() < 0.3:
                draft[spoil.randrange(len(draft))] = spoil.randrange(5, 900)
            self.drafts[number] = torch.tensor(draft)
        return self.drafts[: batch.num_reqs]

    NgramGPUSpeculator.propose = propose


def swap_at_random(engine: Any) -> None:
    """Let rows change places as GPU backends have them do that want decodes before prefills, by vLLM's own means."""
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    dice = random.Random(9)

    def shuffle(_: Any, batch: Any = runner.input_batch) -> None:
        for _ in range(dice.choice([0, 0, 1, 2])):
            if batch.num_reqs > 1:
                batch.swap_states(*dice.sample(range(batch.num_reqs), 2))

    runner._may_reorder_batch = shuffle


def run(engine: Any, cases: list[dict[str, Any]]) -> int:
    """Requests come some a step; some are ended in the middle. Returns how many of the others came out otherwise."""
    draw, left, found, steps = random.Random(1), list(enumerate(cases)), dict[int, list[int]](), 0
    ended = {7: 30, 12: 45, 19: 60}
    while left or engine.has_unfinished_requests():
        for _ in range(draw.choice([0, 1, 1, 2])):
            if left:
                number, case = left.pop(0)
                params = SamplingParams(temperature=0, max_tokens=case["count"], extra_args=case["asked"])
                engine.add_request(f"r{number}", {"prompt_token_ids": case["prompt"]}, params)
        engine.abort_request([f"r{number}" for number, when in ended.items() if when == steps])
        for output in engine.step():
            if output.finished:
                found[int(output.request_id[1:])] = list(output.outputs[0].token_ids)
        steps += 1
    return sum(found.get(number) != case["tokens"] for number, case in enumerate(cases) if number not in ended)


def refused(llm: Any) -> list[str]:
    """Why the engine refuses requests whose parameters cannot be heeded."""
    said = []
    for asked in ({"lz_window": 513}, {"lz_strength": True}, {"lz_alpha": 1}, {"lz_strength": 1e39}):
        try:
            llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1, extra_args=asked), use_tqdm=False)
        except Exception as error:  # noqa: BLE001 - an error of vLLM's own, whose base it changes
            said.append(f"{error} {error.__cause__}")
    return said


def main() -> None:
    """Run all cases, and say what was seen."""
    cases = json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))
    if KIND.startswith("async"):
        schedule_asynchronously()
    if KIND.startswith("spec"):
        propose_drafts()
    llm = LLM(
        str(FOLDER),
        dtype="float32",
        max_model_len=384,
        max_num_seqs=8,
        enforce_eager=True,
        distributed_executor_backend="uni",
        seed=0,
        disable_log_stats=False,
        logits_processors=["tests.vllm.checked:CheckedLZ"],
        **MORE.get(KIND, {}),
    )
    if KIND == "swap":
        swap_at_random(llm.llm_engine)
    differ = run(llm.llm_engine, cases)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    seen = checked.made[-1]
    # vLLM tells of what has ended at the next step.
    llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2), use_tqdm=False)
    told = {
        "differ": differ,
        "rows": seen.rows,
        "wrong": seen.wrong,
        "touched": seen.touched,
        "worst": seen.worst,
        "moves": sorted(seen.moves),
        "v2": seen._v2 is not None,
        "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "preemptions": counts.get("vllm:num_preemptions", 0),
        "drafts_taken": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "left": seen._v1.slots.count if seen._v1 is not None else 0,
        "refused": refused(llm),
    }
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
