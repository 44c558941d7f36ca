"""The command line: `kvlab lab` opens the notebooks, `kvlab model` fetches and checks the model that comes with them."""

import sys
from typing import TYPE_CHECKING, Annotated

from kvlab.errors import ModelUnavailable, UnsupportedModel
from kvlab.fetch import SMOLLM2, cache_dir, check, missing, smollm2
from kvlab.jupyter import start

if TYPE_CHECKING:
    import typer


def main() -> None:
    """The `kvlab` command. Every error that kvlab names is one line on stderr and exit status 1."""
    try:
        app()()
    except ModuleNotFoundError as error:
        sys.exit(f"kvlab: {error.name} is missing: pip install 'kvlab[lab]'")
    except (ModelUnavailable, UnsupportedModel) as error:
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

    return commands
