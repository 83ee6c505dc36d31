"""`kvcupy simulate`: the layout experiment, executed; or a stream of requests, modelled or executed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcupy.backends import DEVICES
from kvcupy.cli import report
from kvcupy.simulate.gpus import find_gpu
from kvcupy.simulate.models import ModelPreset, find_model
from kvcupy.spec import CODECS, LAYOUTS, ROW_ALIGNS, KVSpec, parse_bytes

MODEL, CACHE, EXPERIMENT, STREAM, RUN = "Model", "Cache", "Experiment", "Requests", "Run"

DEFAULT_GPU = "h100"
MODELLED_MEMORY = "40GiB"
EXECUTED_MEMORY = "2GiB"

PTX_LAYERS = 2
"""Layers of the experiment's model on `ptx`, where an instruction of a warp takes microseconds."""


def _option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True)
class _Shape:
    model: ModelPreset
    title: str


def simulate(
    model: Annotated[
        str, _option(MODEL, "--model", help="A public model's shape, such as llama-3-8b.")
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
            help="Sequences at once: 8, on ptx 4; at most 256 of a stream.",
            min=1,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        _option(EXPERIMENT, "--context", help="Tokens of the longest sequence: 1024, on ptx 256.", min=1),
    ] = None,
    steps: Annotated[
        int | None, _option(EXPERIMENT, "--steps", help="Decode steps that are measured: 2, on ptx 1.", min=1)
    ] = None,
    trace: Annotated[Path | None, _option(STREAM, "--trace", help="Replay recorded requests: a CSV file.")] = None,
    limit: Annotated[int | None, _option(STREAM, "--limit", help="Take the first N requests.", min=1)] = None,
    requests: Annotated[int | None, _option(STREAM, "--requests", help="Make N requests up.", min=1)] = None,
    rate: Annotated[float, _option(STREAM, "--rate", help="Requests a second; 0 is all at once.", min=0)] = 1.0,
    prompt_tokens: Annotated[
        str,
        _option(STREAM, "--prompt-tokens", help="N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or zipf:ALPHA:MAX."),
    ] = "lognormal:1024:1",
    output_tokens: Annotated[str, _option(STREAM, "--output-tokens", help="Likewise.")] = "lognormal:256:1",
    device: Annotated[
        str | None,
        _option(
            RUN, "--device", help=f"What executes: {', '.join(DEVICES)}.", show_default="auto; none for a stream"
        ),
    ] = None,
    gpu: Annotated[
        str | None, _option(RUN, "--gpu", help="What is modelled.", show_default=f"{DEFAULT_GPU} for a stream")
    ] = None,
    seed: Annotated[int, _option(RUN, "--seed", help="Of everything random.", min=0)] = 0,
    as_json: Annotated[bool, _option(RUN, "--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate LLM decode over a KV cache.

    Without a stream of requests: the layout experiment, executed on --device. A ragged batch is decoded from
    contiguous and paged caches, padded and not, and each one's bandwidth and waste are reported. On ptx: sectors
    and instructions instead of bandwidth, and unless --layers is given, of two layers.

    With --trace or --requests: continuous batching over requests, first come first served. Modelled for --gpu,
    or executed on --device, or both side by side.
    """
    small = device == "ptx"
    if small and trace is None and requests is None:
        layers = layers or PTX_LAYERS
    shape = _shape(model, layers, q_heads, kv_heads, head_dim)
    preset = shape.model
    if preset.num_q_heads % preset.num_kv_heads:
        raise ValueError(
            f"--q-heads must be a multiple of --kv-heads, got {preset.num_q_heads} and {preset.num_kv_heads}"
        )
    spec = replace(
        preset.spec(page_size=page_size, dtype=dtype, layout=layout),
        row_align=16 if row_align is None else parse_row_align(row_align),
    )
    if trace is None and requests is None:
        if gpu is not None:
            raise ValueError("--gpu models a stream of requests: give --trace FILE or --requests N too")
        if limit is not None:
            raise ValueError("--limit cuts a stream of requests: give --trace FILE or --requests N too")
        padding = "128-elements" if row_align is None else parse_row_align(row_align)
        sizes = (4, 256, 1) if small else (8, 1024, 2)
        batch, context, steps = (given or size for given, size in zip((batch, context, steps), sizes, strict=True))
        _experiment(shape, spec, padding, batch, context, steps, device or "auto", memory, seed, as_json)
        return
    if trace is not None and requests is not None:
        raise ValueError("give --trace or --requests, not both")

    from kvcupy.simulate.trace import read_trace
    from kvcupy.simulate.workload import synthesize

    if trace is not None:
        stream = read_trace(trace, limit)
    else:
        assert requests is not None
        count = min(requests, limit or requests)
        stream = synthesize(count, rate, prompt_tokens, output_tokens, seed)
    _replay(shape, spec, stream, batch or 256, device, gpu, memory, seed, as_json)


def _shape(name: str, layers: int | None, q_heads: int | None, kv_heads: int | None, head_dim: int | None) -> _Shape:
    preset = find_model(name)
    given = {"num_layers": layers, "num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if len(changes) == len(given):
        changes["unsupported"] = None  # the whole shape was given: nothing of the preset's cache is left
    changed = replace(preset, **changes)
    title = (
        f"{preset.name}: {changed.num_layers} layers, {changed.num_q_heads} query and "
        f"{changed.num_kv_heads} KV heads, head_dim {changed.head_dim}"
    )
    return _Shape(changed, title)


def parse_row_align(text: str) -> int | str:
    """A row_align as `KVSpec` takes it."""
    return int(text) if text.isascii() and text.isdigit() else text


def _experiment(
    shape: _Shape,
    spec: KVSpec,
    padding: int | str,
    batch: int,
    context: int,
    steps: int,
    device: str,
    memory: str | None,
    seed: int,
    as_json: bool,
) -> None:
    from kvcupy.simulate.experiment import run_experiment

    churn_slots = 32 * context if memory is None else parse_bytes(memory) // spec.bytes_per_token
    with report.progress(hidden=as_json) as progress:
        result = run_experiment(
            spec,
            num_q_heads=shape.model.num_q_heads,
            batch=batch,
            context=context,
            steps=steps,
            padding=padding,
            device=device,
            seed=seed,
            churn_slots=churn_slots,
            progress=progress,
        )
    if as_json:
        print(json.dumps(report.experiment_json(result), indent=2))
    else:
        report.print_experiment(result, shape.title, spec)


def _replay(
    shape: _Shape,
    spec: KVSpec,
    stream: Any,
    max_batch: int,
    device: str | None,
    gpu: str | None,
    memory: str | None,
    seed: int,
    as_json: bool,
) -> None:
    from kvcupy.simulate.engine import replay
    from kvcupy.simulate.machine import modelled_machine

    results = report.ReplayReport(shape.title, spec, stream, gpu=None, device=None)
    if device is not None:
        from kvcupy.cache import KVCache
        from kvcupy.simulate.execute import ExecutingMachine

        cache = KVCache(spec, memory=memory or EXECUTED_MEMORY, device=device)
        with report.progress(hidden=as_json) as progress:
            machine = ExecutingMachine(cache, shape.model.num_q_heads, seed)
            results.device, results.costs = cache.device, machine.costs
            results.measured = replay(
                stream, machine, max_batch=max_batch, progress=lambda done, total: progress("executing", done, total)
            )
    if gpu is not None or device is None:
        found = find_gpu(gpu or DEFAULT_GPU)
        default = MODELLED_MEMORY if device is None else EXECUTED_MEMORY
        with report.progress(hidden=as_json) as progress:
            modelled = modelled_machine(shape.model, found, spec, parse_bytes(memory or default))
            results.gpu = found
            results.modelled = replay(
                stream, modelled, max_batch=max_batch, progress=lambda done, total: progress("modelling", done, total)
            )
    if as_json:
        print(json.dumps(report.replay_json(results), indent=2))
    else:
        report.print_replay(results)
