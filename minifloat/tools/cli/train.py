"""`minifloat train`: a small language model in low precision, and its high-precision twin."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from minifloat.tools.cli import load, user_errors
from minifloat.tools.cli.names import (
    BF16,
    FINISH_4BIT,
    MAX_GAP,
    MAX_GAP_4BIT,
    MAX_GRADIENT_GAP,
    MODEL,
    MODELS,
    RECIPES,
    TIMEOUT,
    check_names,
)
from minifloat.tools.cli.output import out_folder, output_optional


def train(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="text files or folders, or one packed token file (.npy, .bin); default: Python's standard library"
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help=f"one of {', '.join(RECIPES)} or {BF16}")] = "current",
    against: Annotated[
        str | None, typer.Option(help="a second recipe, from the same start on the same batches, such as bf16")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"one of {', '.join(MODELS)}; default: {MODEL}")] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 120,
    hf: Annotated[
        Path | None, typer.Option(help="in place of --model: a transformers config.json, or a folder with weights too")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="sizes of your own, in place of the --model's: blocks")] = None,
    hidden: Annotated[int | None, typer.Option(help="width of the model")] = None,
    heads: Annotated[int | None, typer.Option(help="query heads")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="key/value heads; default: in the --model's ratio")] = None,
    mlp_hidden: Annotated[int | None, typer.Option(help="width of the MLP; default: in the --model's ratio")] = None,
    context: Annotated[int | None, typer.Option(help="tokens in a sequence")] = None,
    experts: Annotated[int | None, typer.Option(help="a mixture of so many experts in place of each MLP")] = None,
    top_k: Annotated[int | None, typer.Option(help="with --experts: how many of them each token goes to")] = None,
    expert_bias_rate: Annotated[
        float | None,
        typer.Option(help="with --experts: a bias that each step moves by so much balances them, not a loss; 1e-3"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="sequences in a step, or in a micro-batch of it")] = 16,
    accumulate: Annotated[int, typer.Option(help="micro-batches in a step, whose gradients are averaged")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="the peak; default: by the model's width")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seed: Annotated[int, typer.Option(help="of the initial weights and of the batches")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(parser=out_folder, metavar="PATH", help="results and checkpoints; default: runs/RECIPE-TIME"),
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between checkpoints; default: at the end only")] = None,
    keep: Annotated[int, typer.Option(help="how many checkpoints of a run stay")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the last checkpoints in --out, to --steps in all")
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(help="continue from this checkpoint or another --out; with other options: start from its weights"),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json of the tokenizers library; else bytes")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="of a token file; default: the tokenizer's")] = None,
    token_dtype: Annotated[str, typer.Option(help="of a .bin token file: uint16 or uint32")] = "uint16",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write TensorBoard's files too")] = False,
    inspect: Annotated[
        int | None,
        typer.Option(min=1, help="steps from one whose casts are measured to the next; writes inspect.html"),
    ] = None,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="under torchrun: ranks shard the parameters (FSDP2) and share the batch")
    ] = False,
    etp: Annotated[
        int | None,
        typer.Option(
            help="in place of --fsdp: so many of the ranks that share the batch shard weights, cast in shards"
        ),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            help="with --experts, in place of --fsdp: so many of the ranks that share the batch share them out"
        ),
    ] = None,
    tp: Annotated[int, typer.Option(help="ranks that share each layer: tensor parallelism, under torchrun")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option(help="with --tp: what is not split by columns is split by tokens")
    ] = True,
    timeout: Annotated[float, typer.Option(help="minutes after which a rank that hangs ends a step")] = TIMEOUT,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="on one GPU: capture a step and replay it; the same losses, faster")
    ] = False,
    fp32_wgrad: Annotated[
        bool, typer.Option("--fp32-wgrad", help="on one GPU: gradients of linears' weights are never rounded to bf16")
    ] = False,
    finish: Annotated[
        float | None,
        typer.Option(
            help=f"share of the steps, the last, that all runs do in bf16; default: {FINISH_4BIT} with 4 bits, else 0"
        ),
    ] = None,
    max_gap: Annotated[
        float | None,
        typer.Option(help=f"largest relative gap of the losses; default {MAX_GAP}, 4-bit {MAX_GAP_4BIT}; inf: any"),
    ] = None,
    max_gradient_gap: Annotated[float, typer.Option(help="the same of the first gradient norms")] = MAX_GRADIENT_GAP,
) -> None:
    """Train a small Llama-style language model on real text in low precision, of bytes or of a tokenizer's tokens.

    Writes metrics.jsonl, loss.png, report.md and checkpoints. Fails when a linear ran in other formats than its
    recipe's and, where there is a second recipe to compare with, when the losses are too far apart. Ctrl-C saves a
    checkpoint after the step in progress; on a CPU a run that was stopped has the losses of one that was not.
    """
    with ExitStack() as held:  # the streams and the folder, for the whole command
        held.enter_context(output_optional())
        with user_errors():
            names = check_names(recipe, against)
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"minifloat train: {' and then '.join(names)}, {hf or f'model {model or MODEL}'}, {steps} steps")
        load()
        from minifloat.tools.cli import choose_device, device_name
        from minifloat.tools.cli import train_job as jobs
        from minifloat.tools.cli.output import claimed, tensorboard_class
        from minifloat.tools.cli.ranks import PATIENCE, decided_by_first, from_first, joined
        from minifloat.tools.cli.resume import Start, choose, choose_folder
        from minifloat.tools.cli.sizes import OwnSizes, check_memory, sizes_of
        from minifloat.tools.train import data
        from minifloat.tools.train.checkpoint_writer import check_saves
        from minifloat.tools.train.interrupt import end_with_launcher
        from minifloat.tools.train.run import TrainConfig

        with user_errors():
            end_with_launcher()
            jobs.check_limits(max_gap, max_gradient_gap)
            own = OwnSizes(layers, hidden, heads, kv_heads, mlp_hidden, context, experts, top_k, expert_bias_rate)
            sizes = sizes_of(model, own, hf)
            rate = sizes.learning_rate if learning_rate is None else learning_rate
            finish = jobs.default_finish(names) if finish is None else finish
            config = TrainConfig(
                steps, batch_size, rate, seed, accumulate=accumulate, fp32_wgrad=fp32_wgrad, finish=finish
            )
            corpus = data.load(
                paths or (), least=sizes.context + 1, tokenizer=tokenizer, vocabulary=vocabulary,
                token_dtype=token_dtype,
            )  # fmt: skip
            sizes = sizes.with_vocabulary(corpus.vocabulary)
            if tensorboard:
                tensorboard_class()  # now, not after the first step
            ranks, chosen = held.enter_context(
                joined(tp, fsdp, etp, ep, sequence_parallel, choose_device(device), timeout)
            )
            sizes.check_ranks(ranks.size if hf else ranks.tp.size)
            jobs.check_experts(ep, sizes, names)
            check_memory(sizes, config, chosen, ranks)
            check_saves(save_every, keep)
            settings = {name: jobs.settings_of(name, sizes, config, corpus) for name in names}
            if from_first(settings, ranks) != settings:
                raise ValueError("this rank has other text or options than the first; start all with the same ones")
            folder = from_first(choose_folder(names, out, resume, resume_from), ranks)

            def begin() -> Start:
                held.enter_context(claimed(folder))  # first: a process that has just released it may have saved again
                return choose(settings, folder, resume, resume_from)

            start = decided_by_first(begin, ranks)
            job = jobs.Job(
                names, sizes, config, corpus, chosen, folder, save_every, keep, start, tensorboard, ranks, cuda_graph,
                inspect,
            )  # fmt: skip
        if ranks.first:
            typer.echo(f"{sizes.parameters:,} parameters, on {device_name(chosen)}; text: {corpus.source}")
            typer.echo(f"results: {folder}")
        if hf is not None and ranks.first:
            typer.echo(f"model: {sizes}")
        if start.weights:
            typer.echo(f"another run, from the weights of {resume_from}, which had {start.difference}")
        runs = jobs.run_or_stop(job)
        ranks.set_timeout(PATIENCE)
        limit = jobs.default_gap(recipe) if max_gap is None else max_gap
        with user_errors():
            passed = from_first(not ranks.first or jobs.conclude(job, runs, limit, max_gradient_gap), ranks)
        if not passed:
            raise typer.Exit(1)
