"""The command line: `kvlab lab` opens the notebooks, `model` fetches the model, `measure` and `bench` make result rows."""

import ast
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvlab.errors import ModelUnavailable
from kvlab.fetch import SMOLLM2, cache_dir, check, missing, smollm2
from kvlab.jupyter import PANELS, start
from kvlab.jupyter import app as open_app

if TYPE_CHECKING:
    import typer

    from kvlab.measure.tasks import Task
    from kvlab.strategy import Strategy


def main() -> None:
    """The `kvlab` command. Every error that kvlab names is one line on stderr and exit status 1."""
    try:
        app()()
    except ModuleNotFoundError as error:
        sys.exit(f"kvlab: {error.name} is missing: pip install 'kvlab[lab]'")
    except OSError as error:
        sys.exit(f"kvlab: {error.filename}: {error.strerror}" if error.filename and error.strerror else f"kvlab: {error}")
    except (ModelUnavailable, ValueError, RuntimeError) as error:
        sys.exit(f"kvlab: {error}")


def app() -> "typer.Typer":
    """The commands. Typer is imported here, so that this file can be imported in a bare installation."""
    import typer

    commands = typer.Typer(
        help="A lab bench for the KV cache of a language model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @commands.callback()
    def kvlab() -> None:
        pass

    @commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def lab(context: typer.Context) -> None:
        """Open the live lab in JupyterLab. Further options go to JupyterLab (--no-browser, --port 9000 …)."""
        smollm2()
        start(context.args)

    @commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def app(
        context: typer.Context,
        panel: Annotated[str, typer.Argument(help=f"{', '.join(PANELS)}.")] = "live-lab",
    ) -> None:
        """Open one panel as a page without code (Voilà). Further options go to Voilà (--no-browser, --port 9000 …)."""
        smollm2()
        open_app(panel, context.args)

    @commands.command()
    def model(
        full: Annotated[bool, typer.Option("--check", help="Hash every byte (a second), not only sizes and headers.")] = False,
        repair: Annotated[bool, typer.Option(help="Fetch it again, whatever is there.")] = False,
    ) -> None:
        """Fetch the model that comes with the lab, if it is not there yet, check it, and say where it lies."""
        full = full or repair or bool(missing(cache_dir() / SMOLLM2))
        folder = smollm2(repair=repair)
        check(folder, full=full)
        size = sum(path.stat().st_size for path in folder.iterdir())
        typer.echo(f"{folder} ({size / 1e6:.0f} MB, {'every byte' if full else 'sizes and headers'} checked)")

    @commands.command()
    def measure(
        strategy: Annotated[
            list[str] | None,
            typer.Option(
                help="A strategy as `kvlab.Strategy(...)` code prints it, or one that has a name ('H2O + int4'). Many; none: all that have names."
            ),
        ] = None,
        task: Annotated[
            list[str] | None,
            typer.Option(help="A task, such as 'PassKeys(tokens=1024)' or Speed. Many; none: those of the recorded evidence."),
        ] = None,
        model: Annotated[str, typer.Option(help="A shipped name, a folder or a hub id.")] = SMOLLM2,
        out: Annotated[
            Path | None, typer.Option(help="Keep the rows in this JSON-lines file, and take it up where it was left.")
        ] = None,
        workers: Annotated[int, typer.Option(help="Processes that share the work; each loads the model.")] = 1,
        endpoint: Annotated[
            str | None, typer.Option(help="Measure a served model instead: an OpenAI-compatible address up to and with /v1.")
        ] = None,
        concurrency: Annotated[int, typer.Option(help="Requests at once, for --endpoint.")] = 4,
        requests: Annotated[int, typer.Option(help="Requests in all, for --endpoint; every second one repeats a prompt.")] = 16,
        key: Annotated[str, typer.Option(help="The API key of --endpoint.")] = "",
    ) -> None:
        """Measure strategies at tasks, the full cache as control: bytes, quality with the cache in the loop, recall, times; or a served model."""
        if endpoint:
            if strategy or task or workers > 1:
                raise ValueError(
                    "--endpoint measures what a server does: --strategy, --task and --workers say nothing to it (allowed: --model, --out)"
                )
            served(endpoint, model, concurrency, requests, key, typer.echo, out)
            return
        import contextlib

        import kvlab
        from kvlab.measure.experiment import experiment
        from kvlab.measure.experiment import workers as processes
        from kvlab.measure.named import TASKS, name_of, named

        chosen = [read_strategy(text) for text in strategy] if strategy else list(named().values())
        tasks = [read_task(text) for text in task] if task else list(TASKS)
        asked = [f" --strategy {shlex.quote(text)}" for text in strategy or []] + [
            f" --task {shlex.quote(text)}" for text in task or []
        ]
        command = (
            "kvlab measure"
            + "".join(asked)
            + (f" --workers {workers}" if workers > 1 else "")
            + (f" --model {shlex.quote(model)}" if model != SMOLLM2 else "")
        )
        lab = kvlab.load(model)
        with contextlib.ExitStack() as stack:
            executor = stack.enter_context(processes(workers)) if workers != 1 else None
            for row in experiment(lab, chosen, tasks, out=out, executor=executor, progress=True, command=command):
                score = (
                    ""
                    if row.score is None
                    else f"{row.score:6.3f}" + ("" if row.control is None else f" (full cache {row.control:.3f})")
                )
                share = "" if row.ratio is None else f"{100 * row.ratio:6.1f}% of 16-bit"
                more = "  ".join(f"{name} {value:.4g}" for name, value in row.more.items())
                typer.echo(f"{row.task['task']:12} {name_of(row.settings):45} {share:18} {score:28} {more} {row.why}")

    @commands.command()
    def compare(
        strategy: Annotated[list[str] | None, typer.Option(help="A strategy, as for `kvlab measure`. Many.")] = None,
        model: Annotated[str, typer.Option(help="A shipped name, a folder or a hub id.")] = SMOLLM2,
        out: Annotated[Path | None, typer.Option(help="Add the table to this JSON-lines file.")] = None,
        tokens: Annotated[tuple[int, int, int], typer.Option(help="Tokens of prefill, tokens scored, tokens a step.")] = (
            1024,
            1024,
            16,
        ),
    ) -> None:
        """Strategies beside transformers' own caches, quantized ones where their libraries are installed: bytes, KL, time, in one run."""
        from tqdm import tqdm

        import kvlab
        from kvlab.measure import control
        from kvlab.measure.compare import compare, record
        from kvlab.measure.peers import PEERS
        from kvlab.texts import reference_text

        chosen = [read_strategy(text) for text in strategy or SIDE_BY_SIDE]
        lab = kvlab.load(model)
        ids = lab.encode(reference_text()[: 8 * (tokens[0] + tokens[1])])[:, : tokens[0] + tokens[1]]
        against = control(lab, ids, prefill=tokens[0], step=tokens[2])
        typer.echo(f"{'':100}{'bits':>7}{'KL':>10}{'agree':>8}{'perplexity':>12}{'step':>10}")
        rows = []
        try:
            for one in tqdm([*PEERS, kvlab.Strategy(), *chosen], unit="cache", file=sys.stderr):
                (row,) = compare(lab, [one], against)
                rows.append(row)
                numbers = (
                    f"{row.effective_bits:7.2f}{row.kl:10.5f}{row.agreement:8.3f}{100 * row.perplexity_change:+11.2f}%"
                    f"{1e3 * row.step:7.0f} ms"
                )
                typer.echo(f"{row.name:100}{row.why or numbers}")
        finally:  # what was measured before an interruption is kept
            if out and rows:
                command = "kvlab compare" + "".join(f" --strategy {shlex.quote(text)}" for text in strategy or [])
                command += f" --tokens {tokens[0]} {tokens[1]} {tokens[2]}" + (
                    f" --model {shlex.quote(model)}" if model != SMOLLM2 else ""
                )
                record(out, rows, lab, against, command)

    @commands.command()
    def serve(
        model: Annotated[str, typer.Option(help="A shipped name, a folder or a hub id.")] = SMOLLM2,
        strategy: Annotated[
            str, typer.Option(help="What goes into the blocks: Dense, Int with 8 or 4 bits, Fp8; a name or code.")
        ] = "full",
        kv_memory: Annotated[str, typer.Option(help="Bytes of all blocks, such as '256 MB'.")] = "256 MB",
        block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
        prefix_caching: Annotated[bool, typer.Option(help="Share beginnings that are the same.")] = True,
        port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
        host: Annotated[str, typer.Option(help="Who may come in: this machine only, unless you say otherwise.")] = "127.0.0.1",
        key: Annotated[str | None, typer.Option(help="What clients must send as their API key; a new one if not given.")] = None,
        export: Annotated[
            str | None, typer.Option(help="Serve nothing; print these settings as flags of vllm or sglang.")
        ] = None,
    ) -> None:
        """Serve a model through OpenAI's API (completions and chat, streaming): paged, batched continuously, prefixes shared. To try and to measure."""
        import kvlab
        from kvlab.export import hand_over
        from kvlab.serving import Engine
        from kvlab.serving.server import serve as run_server

        chosen = read_strategy(strategy)
        engine = Engine(kvlab.load(model), chosen, kv_memory=kv_memory, block_size=block_size, prefix_caching=prefix_caching)

        if export is not None:
            typer.echo(str(hand_over(engine, export)))
            return

        def ready(address: str, given: str, stop: Callable[[], object]) -> None:
            typer.echo(f"{engine.pool.blocks} blocks of {block_size} tokens at {address}, key {given}")
            sys.stdout.flush()

        try:
            run_server(engine, host=host, port=port, key=key, ready=ready)
        except KeyboardInterrupt:
            typer.echo("stopped")
        except OSError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error

    @commands.command()
    def study(
        name: Annotated[
            str,
            typer.Argument(
                help="compress, overlap, prefill, recall, selective or stream; of serving: paging, blocks, batching, batch8, prefix, shared or simulator. See the README."
            ),
        ],
        model: Annotated[str, typer.Option(help="A shipped name, a folder or a hub id.")] = SMOLLM2,
        out: Annotated[Path | None, typer.Option(help="Add the rows to this JSON-lines file.")] = None,
    ) -> None:
        """Run a study and print its table: what a budget costs, what is forgotten, how long a text may be, what prefetch hides, what blocks save."""
        import kvlab
        from kvlab.measure.studies import study as run_study

        run_study(name, kvlab.load(model), typer.echo, out)

    @commands.command()
    def advise(
        model: Annotated[str, typer.Argument(help="A model of the table, such as Llama-3.1-8B, or the path of a config.json.")],
        device: Annotated[str, typer.Argument(help="Hardware of the table, such as 'H100 SXM 80GB'.")],
        context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 8192,
        concurrency: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
        workload: Annotated[str, typer.Option(help="chat, edge, throughput, long context or multi-turn.")] = "chat",
        devices: Annotated[int, typer.Option(help="How many of the device share the work.")] = 1,
        weight_bits: Annotated[int, typer.Option(help="Bits of a weight.")] = 16,
        per_token: Annotated[float | None, typer.Option(help="Milliseconds that a token may take.")] = None,
        first_token: Annotated[float | None, typer.Option(help="Milliseconds that the first token may take.")] = None,
        engine: Annotated[
            str | None,
            typer.Option(help="Also the first choice as settings for transformers, vllm, sglang, tensorrt-llm or llama.cpp."),
        ] = None,
    ) -> None:
        """What binds, and which strategies to try in which order: bytes and times predicted, quality as measured or published, dangers named."""
        from kvlab.advise import Limits
        from kvlab.advise import advise as ask
        from kvlab.export import export

        limits = Limits(per_token=per_token and per_token / 1e3, first_token=first_token and first_token / 1e3)
        advice = ask(model, device, context, concurrency, workload, limits, devices=devices, weight_bits=weight_bits)
        typer.echo(str(advice))
        if engine:
            able = [one for one in advice.options if one.meets and export(one.strategy, engine).complete]
            option = able[0] if able else advice.best or advice.nearest
            if not able:
                typer.echo(f"\n{engine} can do none of the options that meet the limits; below is what it has no equivalent for")
            elif option is not advice.best:
                typer.echo(f"\nthe first of them that {engine} can do:")
            typer.echo(f"\n{option.strategy.to_code()}\n{export(option.strategy, engine)}")

    bench = typer.Typer(help="Speed, as ratios within one run.", no_args_is_help=True)
    commands.add_typer(bench, name="bench")

    @bench.callback()
    def benches() -> None:
        pass

    @bench.command()
    def attention(
        tokens: Annotated[int, typer.Option(help="Tokens in the cache.")] = 8192,
        steps: Annotated[int, typer.Option(help="Decode steps that count.")] = 40,
        out: Annotated[Path | None, typer.Option(help="Add the table to this JSON-lines file.")] = None,
    ) -> None:
        """One decode step of one layer (32 query heads, 8 KV heads, dim 128), against transformers' own caches."""
        from kvlab.measure.bench import Shape, bench_attention, record

        rows = bench_attention(Shape(tokens=tokens), steps=steps)
        if out:
            record(out, rows, tokens, steps)
        dynamic = next(row.total for row in rows if row.name == "DynamicCache")
        typer.echo(f"{'':36}{'update':>9}{'attention':>11}{'together':>10}   DynamicCache / this   error against float64")
        for row in rows:
            typer.echo(
                f"{row.name:36}{1e3 * row.update:9.2f}{1e3 * row.attention:11.2f}{1e3 * row.total:10.2f} ms{dynamic / row.total:14.2f} x{row.error:20.5f}"
            )

    @bench.command()
    def speed(
        model: Annotated[str, typer.Option(help="A shipped name, a folder or a hub id.")] = SMOLLM2,
        out: Annotated[Path, typer.Option(help="Write the rows to this JSON-lines file, in place of what is there.")] = Path(
            "speed.jsonl"
        ),
    ) -> None:
        """With a cache and without one, at several context lengths; the first runs of a freshly loaded model apart."""
        from kvlab.lab import Lab
        from kvlab.measure.speed import record
        from kvlab.models import load_model

        record(out, Lab(model, *load_model(model)))  # not kvlab.load: its probe would warm the model up
        typer.echo(f"written to {out}")

    return commands


#: What `kvlab compare` puts beside the others when nothing is named: eight bits and less, each with its best known settings.
SIDE_BY_SIDE = (
    "kvlab.Strategy(store=store.Int(plain='float16'))",
    "kvlab.Strategy(store=store.Int(bits=4, plain='float16'))",
    "kvlab.Strategy(store=store.Int(bits=4, group_size=32, residual=128, plain='float16'))",
    "kvlab.Strategy(store=store.PreRope(store.Int(bits=3, plain='float16')))",
    "kvlab.Strategy(store=store.KIVI(plain='float16'))",
    "kvlab.Strategy(store=store.PreRope(store.Rotated(store.Mixed(bits=3, value_levels='normal', plain='float16'), kind='random', keys=False)))",
    "kvlab.Strategy(store=store.PreRope(store.Rotated(store.Mixed(bits=3, group_size=256, value_levels='normal', plain='float16'), kind='random', keys=False)))",
    "kvlab.Strategy(store=store.PreRope(store.Int(bits=2, plain='float16')))",
    "kvlab.Strategy(store=store.LowRank(rank=48, bits=8, values=False))",
)


def served(
    url: str, model: str, concurrency: int, requests: int, key: str, say: Callable[[str], object], out: Path | None = None
) -> None:
    """Send stretches of the reference text to a server, each twice, and print what came: times, throughput, the effect of prompts sent before; ``out``: add
    the summary and every request to a JSON-lines file, once all have ended."""
    import dataclasses
    import datetime
    import json
    import time

    from kvlab.measure.endpoint import measure_endpoint, summary, watched
    from kvlab.texts import long_text

    text = long_text()
    prompts = [text[4000 * (i // 2) % 300_000 :][:4000] for i in range(requests)]
    order = [*prompts[::2], *prompts[1::2]]  # all of them once, then again
    with watched(url, key=key) as seen:
        begun = time.perf_counter()
        rows = measure_endpoint(url, model=model, prompts=order, concurrency=concurrency, key=key)
        took = time.perf_counter() - begun
    told = summary(rows, order, took, seen.most)
    say(str(told))
    if out is not None:
        about = {
            "endpoint": url,
            "model": model,
            "concurrency": concurrency,
            "date": datetime.date.today().isoformat(),
            "seconds": took,
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(about | {"summary": dataclasses.asdict(told), "requests": [dataclasses.asdict(row) for row in rows]})
                + "\n"
            )
    if not any(row.ok for row in rows):
        raise ValueError(f"none of {len(rows)} requests came through")


def read_task(text: str) -> "Task":
    """A task from its name and settings, ``PassKeys(tokens=1024)`` or ``PassKeys``. The text is read, never run.

    Raises ``ValueError`` for anything but one of ``kvlab.measure.tasks`` with constants.
    """
    from kvlab.measure.tasks import from_dict

    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return from_dict({"task": call.id})
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and not call.args
            and all(key.arg for key in call.keywords)
        ):
            return from_dict({"task": call.func.id} | {str(key.arg): ast.literal_eval(key.value) for key in call.keywords})
    except SyntaxError as error:
        raise ValueError(f"task {text!r} is not readable: {error.msg}") from error
    raise ValueError(f"task {text!r} must look like PassKeys(tokens=1024)")


def read_strategy(text: str) -> "Strategy":
    """A strategy from the code that :meth:`Strategy.to_code` writes, or by its name in ``kvlab.measure.named``. The text is read, never run.

    Raises ``ValueError`` for anything but a name or calls of the three axes' methods with constants.
    """
    from kvlab.measure.named import named
    from kvlab.strategy import AXES, Strategy, from_dict, methods

    if (known_as := (named() | {"full": Strategy()}).get(text.strip())) is not None:
        return known_as

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return -node.operand.value  # type: ignore[operator]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            axis = node.func.value.id
            known = methods(axis).get(node.func.attr) if axis in AXES else None
            names = list(known.settings()) if known else []
            if axis in AXES and len(node.args) <= len(names):
                settings = dict(zip(names, map(value, node.args), strict=False))
                settings |= {key.arg: value(key.value) for key in node.keywords if key.arg}
                return from_dict(
                    axis,
                    {"method": node.func.attr, **{k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in settings.items()}},
                )
        raise ValueError(
            f"strategy {text!r}: {ast.unparse(node)} is neither a constant nor a method such as keep.Window(size=128)"
        )

    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"strategy {text!r} is not readable: {error.msg}") from error
    name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
    if not isinstance(call, ast.Call) or call.args or name not in ("kvlab.Strategy", "Strategy"):
        raise ValueError(
            f"strategy {text!r} must look like kvlab.Strategy(keep=keep.Window(size=128)), or be a name such as 'H2O + int4'"
        )
    parts = {key.arg: value(key.value) for key in call.keywords if key.arg}
    unknown = set(parts) - {*AXES, "chunk"}
    if unknown:
        raise ValueError(f"strategy {text!r}: unknown {sorted(unknown)} (allowed: {', '.join((*AXES, 'chunk'))})")
    return Strategy(**parts)
