"""Flags of llama.cpp that the commands accept and ignore, or refuse with a hint."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal

IgnoredFlag = tuple[tuple[str, ...], bool | Literal["?"], str]
"""Names of a flag, whether a value follows ("?": maybe), and the reason why it does nothing."""
IGNORED: tuple[IgnoredFlag, ...] = (
    (("--jinja",), False, "chat templates are Jinja always"),
    (("--no-jinja",), False, "chat templates are Jinja always"),
    (("--flash-attn", "-fa"), "?", "the device decides how attention is computed"),
    (("--kv-unified", "-kvu"), False, "the context is always one pool"),
    (("--cont-batching", "-cb"), False, "requests join and leave at any time"),
    (("--spec-type",), True, "the drafter's file names its kind, and --draft none drafts nothing"),
    (("--dflash",), False, "the drafter's file names its kind"),
    (("--device-draft", "-devd"), True, "the drafter runs on the model's device"),
    (("--ctx-size-draft", "-cd"), True, "the drafter has the model's context"),
    (("--offline",), False, "nothing is downloaded"),
    (("--swa-full",), False, "cached prefixes hold all that layers with a window need"),
    (("--log-disable",), False, "the log has one line per request"),
    (("--mlock",), False, "weights are not locked in memory"),
    (("--no-mmap",), False, "the device decides how weights are read"),
    (("--no-context-shift",), False, "the context is never shifted"),
    (("--draft-p-min", "--spec-draft-p-min"), True, "drafts end where they no longer pay"),
    (("--log-verbosity", "--verbosity", "-lv"), True, "the log has one line per request"),
    (("--prompt-cache-all",), False, "--prompt-cache always holds the answer too"),
)
"""Accepted flags without effect."""

REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hfd", "-hfrd", "--hf-repo-draft"),
            *("-mu", "--model-url", "-dr", "--docker-repo"),
        ),
        "nothing is downloaded: download the file and give it with -m, a drafter with -md",
    ),
    (
        ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
        "adapters are not applied: merge a LoRA into the model and convert the result",
    ),
    (("-bs", "--backend-sampling"), "a device selects the best logits, the CPU samples"),
    (
        (
            "--rope-scaling",
            "--rope-scale",
            "--rope-freq-base",
            "--rope-freq-scale",
            "--yarn-orig-ctx",
        ),
        "the model's file says how positions are scaled",
    ),
    (("-mm", "--mmproj", "-mmu", "--mmproj-url", "--image"), "images and audio are not supported"),
    (("-ot", "--override-tensor"), "use -ncmoe N or -cmoe to keep experts on the CPU"),
    (
        (
            *("--samplers", "--sampling-seq", "--mirostat", "--top-nsigma", "--typical"),
            *("--dynatemp-range", "--dry-multiplier", "--xtc-probability"),
        ),
        "not supported: there are --temp, --top-k, --top-p, --min-p and penalties",
    ),
    (
        ("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
        "a model runs on one GPU: name it with -dev",
    ),
)
"""Unsupported flags that would change the answer: their names, and what to do instead."""


CONSTRAINTS = ("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file")
"""Flags of llama.cpp that constrain answers, of which dflash-run has all."""


def add_llama_flags(
    p: argparse.ArgumentParser,
    more: Iterable[IgnoredFlag] = (),
    refused: Iterable[tuple[tuple[str, ...], str]] = (),
) -> None:
    """Adds llama.cpp flags to ignore or to refuse; `more` and `refused`: those of one command."""
    group = p.add_argument_group("flags of llama.cpp that do nothing here")
    for flags, has_value, why in (*IGNORED, *more):
        nargs = 0 if not has_value else "?" if has_value == "?" else None
        group.add_argument(
            *flags,
            action=_Ignored,
            default=[],
            dest="ignored",
            nargs=nargs,
            metavar="X",
            const=why,
            help=f"ignored: {why}",
        )
    for flags, why in (*REFUSED, *refused):
        group.add_argument(*flags, action=_Refused, nargs="*", const=why, help=argparse.SUPPRESS)


def ignored_flags(args: argparse.Namespace) -> list[str]:
    """Returns a line about each given flag that has no effect."""
    return [f"{flag} is ignored: {why}" for flag, why in dict(args.ignored).items()]


class _Ignored(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: object,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        namespace.ignored = [*namespace.ignored, (flag, self.const)]


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: object,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string}: {self.const}")
