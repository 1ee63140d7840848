"""What to run for a configuration: servers that start it, and what would falsify its numbers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

from energylens.results.search import Frontier, PrefillPool, ScoredConfig
from energylens.spec.system import Parallelism

_HAND_OVER = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
"""Option of an instance that hands KV caches to others, or gets them."""

_BENCH_S = 600.0  # of traffic

PredictCommand = Callable[[str], str]
"""Gives ``energylens predict SPEC …`` for a device."""


def commands(
    f: Frontier, config: ScoredConfig, predict_command: PredictCommand
) -> dict[str, str | None]:
    """Commands for a configuration by what they are for; None where there is none.

    ``launch`` starts a replica, after ``power_limit`` where one was asked for; ``sglang`` and
    ``trtllm`` start the same layout under engines that nobody has calibrated; ``predict`` gives its
    numbers again; ``bench``, against the launched server, and ``profile`` measure what they are in
    truth.
    """
    serves = f.engine == "vllm" and _made_on_loading(f)
    limit = {} if f.power_limit_w is None else {"power_limit": _power_limit(f.power_limit_w)}
    if config.prefill is not None:
        return limit | _disaggregated(f, config, config.prefill, predict_command)
    return limit | {
        "launch": launch_command(f, config),
        "sglang": _sglang(f, config) if serves else None,
        "trtllm": _trtllm(f, config) if serves else None,
        "predict": _predict(f, config, predict_command),
        "bench": _bench(f, config) if launch_command(f, config) else None,
        "profile": _profile(f, config),
    }


def command_lines(
    f: Frontier, config: ScoredConfig, predict_command: PredictCommand
) -> dict[str, str]:
    """The commands as people read them, by a heading; where there is none, why, or no line."""
    found = commands(f, config, predict_command)

    def launch(command: str | None, p: Parallelism) -> str:
        if not command:
            return _no_launch(f)
        own = p.replica_gpus
        each = f"{own} GPUs of its own" if own > 1 else "a GPU of its own"
        remarks = [f"{p.replicas} of these, each on {each}"] if p.replicas > 1 else []
        if p.overlap:
            remarks.append(f"without the overlap, for which {f.engine} has no switch")
        return f"{command}   # {'; '.join(remarks)}" if remarks else command

    limit = found.get("power_limit")
    before = {"before": f"{limit}   # as root, where the GPUs are"} if limit else {}
    if config.prefill is not None:
        return before | {
            "launch, prefill": launch(found["launch_prefill"], config.prefill.parallelism),
            "launch, decode": launch(found["launch"], config.parallelism),
            "in front of both": "a proxy that sends a prompt to one that prefills, then to one "
            "that decodes (vLLM's disaggregated prefilling)",
            "check, prefill": found["predict_prefill"] or "",
            "check, decode": found["predict"] or "",
        }
    lines = {
        "launch": launch(found["launch"], config.parallelism),
        "sglang, not calibrated": found["sglang"],
        "trtllm, not calibrated": found["trtllm"],
        "check": found["predict"],
        "measure the server": found["bench"],
        "measure energy, too": found["profile"],
    }
    return before | {name: text for name, text in lines.items() if text}


def _disaggregated(
    f: Frontier, config: ScoredConfig, prefill: PrefillPool, predict_command: PredictCommand
) -> dict[str, str | None]:
    """The same of both pools; requests reach them through a proxy, which is not started here."""
    decode = replace(config, prefill=None)
    first = replace(decode, parallelism=prefill.parallelism, batch=prefill.batch)
    launches = [launch_command(f, c) for c in (first, decode)]
    handed = [f"{launch} {_HAND_OVER}" if launch else None for launch in launches]
    return {
        "launch_prefill": handed[0],
        "launch": handed[1],
        "predict_prefill": f"{_predict(f, first, predict_command)} --phase prefill",
        "predict": _predict(f, decode, predict_command),
    }


def launch_command(f: Frontier, config: ScoredConfig) -> str | None:
    """The command that starts one replica of a configuration; None where the engine has none."""
    p, pool = config.parallelism, config.pool
    if f.engine != "vllm" or p.ep not in (1, p.workers) or not _made_on_loading(f):
        return None
    options = [f"--tensor-parallel-size {p.tp}"]
    if p.pp > 1:
        options.append(f"--pipeline-parallel-size {p.pp}")
    if p.dp > 1:
        options.append(f"--data-parallel-size {p.dp}")
    if p.ep > 1:
        options.append("--enable-expert-parallel")
    sequences = -(-config.batch // p.dp)
    options.append(f"--max-num-seqs {sequences}")
    captured = pool.captured_tokens if f.rate_per_s is None else None
    if captured and 2 * sequences < captured:
        # vLLM captures steps of twice the sequences; more were priced as captured.
        options.append(f"--max-cudagraph-capture-size {pool.captured_tokens}")
    if pool.batch_tokens:
        options.append(f"--max-num-batched-tokens {pool.batch_tokens}")
    options.append(f"--max-model-len {f.prompt_len + f.gen_len}")
    options += _stored(f, fp8_cache="fp8")
    return f"vllm serve {_model(f)} {' '.join(options)}"


def _made_on_loading(f: Frontier) -> bool:
    """Whether servers make what is asked for out of the checkpoint; else they need another one."""
    return set(f.precision.values()) <= {"fp8"}


def _stored(f: Frontier, *, fp8_cache: str) -> list[str]:
    """Options of vLLM and SGLang, which name caches differently, for what is stored in FP8."""
    options = {"weights": "--quantization fp8", "kv_cache": f"--kv-cache-dtype {fp8_cache}"}
    return [options[role] for role in f.precision]


def _power_limit(limit_w: float) -> str:
    return f"nvidia-smi --power-limit {limit_w:g}"


def _no_launch(f: Frontier) -> str:
    if f.engine != "vllm":
        return f"no server of engine {f.engine} is known"
    if not _made_on_loading(f):
        stored = ", ".join(f"{role} in {dtype}" for role, dtype in f.precision.items())
        return f"none, vllm does not make {stored} of this checkpoint"
    return "none, vllm spreads experts over all workers or over none"


def _sglang(f: Frontier, config: ScoredConfig) -> str:
    """SGLang's ``--tp-size`` counts all workers of a stage; attention is then data parallel."""
    p, pool = config.parallelism, config.pool
    options = [f"--tp-size {p.workers}"]
    if p.dp > 1:
        options.append(f"--dp-size {p.dp} --enable-dp-attention")
    if p.ep > 1:
        options.append(f"--ep-size {p.ep}")
    if p.pp > 1:
        options.append(f"--pp-size {p.pp}")
    options.append(f"--max-running-requests {config.batch}")
    options.append(f"--cuda-graph-max-bs {-(-config.batch // p.dp)}")
    if pool.batch_tokens:
        options.append(f"--chunked-prefill-size {pool.batch_tokens}")
    options.append(f"--context-length {f.prompt_len + f.gen_len}")
    options += _stored(f, fp8_cache="fp8_e4m3")
    return f"python -m sglang.launch_server --model-path {_model(f)} {' '.join(options)}"


def _trtllm(f: Frontier, config: ScoredConfig) -> str | None:
    """TensorRT-LLM's attention is data parallel over all workers of a stage, or over none."""
    p, pool = config.parallelism, config.pool
    if p.dp not in (1, p.workers) or f.precision:  # it serves what the checkpoint was made into
        return None
    options = [f"--tp_size {p.workers}"]
    if p.ep > 1:
        options.append(f"--ep_size {p.ep}")
    if p.pp > 1:
        options.append(f"--pp_size {p.pp}")
    options.append(f"--max_batch_size {-(-config.batch // p.dp)}")
    if pool.batch_tokens:
        options.append(f"--max_num_tokens {pool.batch_tokens}")
    options.append(f"--max_seq_len {f.prompt_len + f.gen_len}")
    if p.dp > 1:
        options.append("--extra_llm_api_options <(echo 'enable_attention_dp: true')")
    return f"trtllm-serve {_model(f)} {' '.join(options)}"


def _predict(f: Frontier, config: ScoredConfig, command: PredictCommand) -> str:
    degrees = config.parallelism.degrees
    options = "".join(f" --{name} {n}" for name, n in degrees.items() if n > 1)
    if config.parallelism.overlap is not None:
        options += f" --overlap {config.parallelism.overlap}"
    if config.parallelism.pp > 1:
        options += f" --microbatches {min(config.parallelism.pp, config.batch)}"
    lengths = f"--prompt-len {f.prompt_len} --gen-len {f.gen_len}"
    load = f"--batch {config.batch}"
    if f.rate_per_s is not None:
        load = f"--rate {f.rate_per_s:g} --max-num-seqs {config.batch}"
    return f"{command(config.pool.device)}{options} {load} {lengths}"


def _bench(f: Frontier, config: ScoredConfig) -> str:
    """One batch at once, or its traffic, against the launched replica."""
    load = f"--num-prompts {config.batch} --max-concurrency {config.batch}"
    if f.rate_per_s is not None:
        rate = f.rate_per_s / config.parallelism.replicas
        load = f"--request-rate {rate:.4g} --num-prompts {max(1, round(_BENCH_S * rate))}"
    return (
        f"vllm bench serve --model {_model(f)} --dataset-name random "
        f"--random-input-len {f.prompt_len} --random-output-len {f.gen_len} --ignore-eos "
        f"{load} --percentile-metrics ttft,tpot,e2el"
    )


def _profile(f: Frontier, config: ScoredConfig) -> str | None:
    """One replica on this machine's GPUs, with their energy; as the checkpoint is stored."""
    p = config.parallelism
    if p.dp > 1 or f.precision or f.rate_per_s is not None:  # it measures a batch
        return None
    degrees = "".join(
        f" --{name} {n}" for name in ("tp", "ep", "pp") if (n := getattr(p, name)) > 1
    )
    context = "" if f.gen_len < 2 else f" --context-len {f.prompt_len + f.gen_len // 2}"
    measured = "--ttft" if f.gen_len < 2 else "--ttft --tpot --ttlt"
    return (
        f"energylens profile {_model(f)} --engine {f.engine}{degrees} --batch-size {config.batch} "
        f"--prompt-len {f.prompt_len} --gen-len {f.gen_len}{context} {measured} --energy"
    )


def _model(f: Frontier) -> str:
    return shlex.quote(f.source_id.split()[0] if f.source_id.split() else f.spec)
