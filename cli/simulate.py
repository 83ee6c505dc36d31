"""`kvcupy simulate`: the layout experiment, executed; or a stream of requests, modelled or executed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcupy import __version__
from kvcupy.backends import DEVICES
from kvcupy.cli import report
from kvcupy.simulate.gpus import find_gpu
from kvcupy.simulate.models import ModelPreset, find_model
from kvcupy.simulate.trace import Trace, read_trace
from kvcupy.simulate.workload import synthesize
from kvcupy.spec import CODECS, LAYOUTS, ROW_ALIGNS, KVSpec

MODEL, CACHE, EXPERIMENT, STREAM, RUN = "Model", "Cache", "Experiment", "Requests", "Run"

DEFAULT_GPU = "h100"
MODELLED_MEMORY = "40GiB"
EXECUTED_MEMORY = "2GiB"

PTX_LAYERS = 2
"""Layers of the experiment's model on `ptx`, where an instruction of a warp takes microseconds."""


def _option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def simulate(
    ctx: typer.Context,
    model: Annotated[
        str, _option(MODEL, "--model", help="A public model's shape: `kvcupy info` lists them.")
    ] = "llama-2-7b",
    layers: Annotated[int | None, _option(MODEL, "--layers", help="Layers, instead of the model's.", min=1)] = None,
    q_heads: Annotated[int | None, _option(MODEL, "--q-heads", help="Query heads.", min=1)] = None,
    kv_heads: Annotated[int | None, _option(MODEL, "--kv-heads", help="KV heads.", min=1)] = None,
    head_dim: Annotated[int | None, _option(MODEL, "--head-dim", help="Elements of a head.", min=1, max=512)] = None,
    dtype: Annotated[
        str, _option(CACHE, "--dtype", help=f"How K and V are stored: {', '.join(CODECS)}.")
    ] = "float16",
    page_size: Annotated[int, _option(CACHE, "--page-size", help="Tokens in a page.", min=1)] = 16,
    layout: Annotated[
        str, _option(CACHE, "--layout", help=f"Order in a page: {', '.join(LAYOUTS)}.")
    ] = "interleaved",
    row_align: Annotated[
        str | None,
        _option(
            CACHE,
            "--row-align",
            help=f"Pad rows to so many bytes: {', '.join(map(str, ROW_ALIGNS))}. "
            "Default: 128-elements for the experiment's padded rows, else 16.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        _option(
            CACHE,
            "--memory",
            help=f"The KV pool. Default: {MODELLED_MEMORY} modelled, {EXECUTED_MEMORY} executed; for the "
            "experiment's churn, 32 sequences of --context.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        _option(
            EXPERIMENT,
            "--batch",
            help="Sequences decoded together. Default: 8 (4 on ptx); for requests, at most 256.",
            min=1,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        _option(EXPERIMENT, "--context", help="Tokens of the longest sequence. Default: 1024 (256 on ptx).", min=1),
    ] = None,
    steps: Annotated[
        int | None, _option(EXPERIMENT, "--steps", help="Decode steps measured. Default: 3 (1 on ptx).", min=1)
    ] = None,
    trace: Annotated[Path | None, _option(STREAM, "--trace", help="Replay recorded requests: a CSV file.")] = None,
    limit: Annotated[int | None, _option(STREAM, "--limit", help="Take the first N requests.", min=1)] = None,
    requests: Annotated[int | None, _option(STREAM, "--requests", help="Generate N requests.", min=1)] = None,
    rate: Annotated[float, _option(STREAM, "--rate", help="Requests a second; 0 is all at once.", min=0)] = 1.0,
    prompt_tokens: Annotated[
        str,
        _option(STREAM, "--prompt-tokens", help="N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or zipf:ALPHA:MAX."),
    ] = "lognormal:1024:1",
    output_tokens: Annotated[str, _option(STREAM, "--output-tokens", help="Likewise.")] = "lognormal:256:1",
    device: Annotated[
        str | None,
        _option(
            RUN, "--device", help=f"Execute on: {', '.join(DEVICES)}. Default: auto; requests are only modelled."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        _option(RUN, "--gpu", help=f"Model this GPU: `kvcupy info` lists them. Default for requests: {DEFAULT_GPU}."),
    ] = None,
    seed: Annotated[int, _option(RUN, "--seed", help="Seed of lengths, arrivals and values.", min=0)] = 0,
    as_json: Annotated[bool, _option(RUN, "--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate LLM decode over a KV cache.

    Without requests, this is the layout experiment, executed on --device: a ragged batch is decoded from contiguous
    and paged caches, padded and not, and the bandwidth and the waste of each are reported. On ptx, sectors and
    instructions are counted instead, for two layers unless --layers is given.

    With --trace or --requests, requests are served by continuous batching, first come first served: modelled for
    --gpu, executed on --device, or both side by side.
    """
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    _refuse(given, trace is None and requests is None, {"limit", "gpu"}, "--trace FILE or --requests N")
    _refuse(given, requests is None, {"rate", "prompt_tokens", "output_tokens"}, "--requests N")
    if trace is not None and requests is not None:
        raise ValueError("give --trace or --requests, not both")
    served = trace is not None or requests is not None
    if served and given & {"context", "steps"}:
        raise ValueError("--context and --steps belong to the experiment, which runs without --trace and --requests")
    small = device == "ptx" and not served
    preset = _shape(model, layers or (PTX_LAYERS if small else None), q_heads, kv_heads, head_dim)
    spec = replace(
        preset.spec(page_size=page_size, dtype=dtype, layout=layout),
        row_align=parse_row_align(row_align or "16"),
    )
    if not served:
        _experiment(
            preset,
            spec,
            parse_row_align(row_align or "128-elements"),
            batch=batch or (4 if small else 8),
            context=context or (256 if small else 1024),
            steps=steps or (1 if small else 3),
            device=device or "auto",
            memory=memory,
            seed=seed,
            as_json=as_json,
        )
        return

    if trace is not None:
        stream = read_trace(trace, limit)
    else:
        assert requests is not None
        stream = synthesize(min(requests, limit or requests), rate, prompt_tokens, output_tokens, seed)
    _replay(
        preset,
        spec,
        stream,
        max_batch=batch or 256,
        device=device,
        gpu=gpu,
        memory=memory,
        seed=seed,
        as_json=as_json,
    )


def _refuse(given: set[str], missing: bool, options: set[str], needed: str) -> None:
    """An option that would be ignored is refused."""
    for option in sorted(given & options) if missing else ():
        raise ValueError(f"--{option.replace('_', '-')} is for requests: give {needed} too")


def _shape(
    name: str, layers: int | None, q_heads: int | None, kv_heads: int | None, head_dim: int | None
) -> ModelPreset:
    """A preset with what was given in its place; weights shrink or grow with the layers."""
    preset = find_model(name)
    given = {"num_layers": layers, "num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if len(changes) == len(given):
        changes["unsupported"] = None  # the whole shape was given: nothing of the preset's cache is left
    if layers is not None:
        for key in ("num_parameters", "active_parameters"):
            changes[key] = max(1, round(getattr(preset, key) * layers / preset.num_layers))
    changed = replace(preset, **changes)
    if changed.num_q_heads % changed.num_kv_heads:
        raise ValueError(
            f"--q-heads must be a multiple of --kv-heads, got {changed.num_q_heads} and {changed.num_kv_heads}"
        )
    return changed


def parse_row_align(text: str) -> int | str:
    """A row_align as `KVSpec` takes it."""
    return int(text) if text.isascii() and text.isdigit() else text


def _settings(model: ModelPreset, spec: KVSpec, **others: Any) -> dict[str, Any]:
    """What was simulated, for the JSON report."""
    shape = {"model": model.name, "num_q_heads": model.num_q_heads}
    return {"version": __version__, **shape, **asdict(spec), **others}


def _experiment(
    model: ModelPreset,
    spec: KVSpec,
    padding: int | str,
    *,
    batch: int,
    context: int,
    steps: int,
    device: str,
    memory: str | None,
    seed: int,
    as_json: bool,
) -> None:
    from kvcupy.simulate.experiment import run_experiment

    churn_bytes = None if memory is None else spec.pool_pages(memory) * spec.page_bytes
    with report.progress(hidden=as_json) as progress:
        result = run_experiment(
            spec,
            num_q_heads=model.num_q_heads,
            batch=batch,
            context=context,
            steps=steps,
            padding=padding,
            device=device,
            seed=seed,
            churn_bytes=churn_bytes,
            progress=progress,
        )
    if as_json:
        settings = _settings(model, spec, batch=batch, context=context, steps=steps, seed=seed)
        settings |= {"row_align": padding, "churn_bytes": churn_bytes}
        print(json.dumps(report.experiment_json(result, settings), indent=2))
    else:
        report.print_experiment(result, model, spec, padding)


def _replay(
    model: ModelPreset,
    spec: KVSpec,
    stream: Trace,
    *,
    max_batch: int,
    device: str | None,
    gpu: str | None,
    memory: str | None,
    seed: int,
    as_json: bool,
) -> None:
    from kvcupy.simulate.engine import replay
    from kvcupy.simulate.machine import modelled_machine

    memory = memory or (MODELLED_MEMORY if device is None else EXECUTED_MEMORY)
    modelled_gpu = find_gpu(gpu or DEFAULT_GPU) if gpu is not None or device is None else None
    results = report.ReplayReport(model, spec, stream)
    with report.progress(hidden=as_json) as progress:
        if device is not None:
            from kvcupy.cache import KVCache
            from kvcupy.simulate.execute import ExecutingMachine

            cache = KVCache(spec, memory=memory, device=device)
            machine = ExecutingMachine(cache, model.num_q_heads, seed)
            results.device, results.costs = cache.device, machine.costs
            results.measured = replay(
                stream, machine, max_batch=max_batch, progress=lambda done, total: progress("executing", done, total)
            )
        if modelled_gpu is not None:
            modelled = modelled_machine(model, modelled_gpu, spec, memory)
            results.gpu = modelled_gpu
            results.modelled = replay(
                stream, modelled, max_batch=max_batch, progress=lambda done, total: progress("modelling", done, total)
            )
    if as_json:
        settings = _settings(model, spec, max_batch=max_batch, memory=memory, seed=seed)
        print(json.dumps(report.replay_json(results, settings), indent=2))
    else:
        report.print_replay(results)
