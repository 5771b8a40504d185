"""A build's text as a GPU compiles it: without the host's parts, and with Config's values in it.

NVRTC makes the same code of both texts. What is left is as kernels/ has it: comments, lines, and
every macro but those that separate GPU and host. A preprocessor would keep none of these three.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: What NVRTC defines for every architecture, as far as kernels/ asks for it.
_DEFINED = ("__CUDACC__", "__CUDACC_RTC__")
_CONDITION = re.compile(r"\s*defined\((\w+)\)\s*")
_DIRECTIVE = re.compile(r"\s*#\s*(if\w*|el\w+|endif)\b(.*)")
#: What opens and closes a macro's arguments, and whatever may hold such text that is no code.
_TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])' | ^\#(?:[^\n]*\\\n)*[^\n]*
    | \bMOE_NVLINK_(?P<executor>DEVICE|HOST)_ONLY\( | (?P<bracket>[()])""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_DEFINES_ONLY = re.compile(r"^#define MOE_NVLINK_(?:DEVICE|HOST)_ONLY\(.*\n", re.MULTILINE)
_CONFIG = re.compile(r"^struct (?:Runtime)?Config\b[^{;]*\{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_VALUE = re.compile(r"static constexpr \w+ (k\w+) = ([^;]+);")
_USE = re.compile(r"\bConfig::(k\w+)")


def as_compiled(text: str, architecture: str) -> str:
    """Return a translation unit of source.translation_unit as a GPU's compiler sees it. Local.

    Args:
        text: the translation unit.
        architecture: such as "sm_90a".

    Raises:
        ValueError: kernels/ has a condition that this module does not understand.
    """
    lines = _chosen(text, architecture)
    text = _DEFINES_ONLY.sub("", "".join(lines))
    return re.sub(r"\n{3,}", "\n\n", _with_values(_for_gpu(text)))


def _chosen(text: str, architecture: str) -> Iterator[str]:
    """Yield the lines that conditions leave, without the conditions."""
    defined = {*_DEFINED}
    if (feature := re.fullmatch(r"sm_(\d+)a", architecture)) is not None:
        defined.add(f"__CUDA_ARCH_FEAT_SM{feature[1]}_ALL")
    is_kept: list[bool] = []  # of each condition that is open, the outermost first
    for line in re.findall(r"(?:.*\\\n)*.*\n", text):
        directive = _DIRECTIVE.match(line.replace("\\\n", ""))
        if directive is None:
            if all(is_kept):
                yield line
            continue
        word, condition = directive.groups()
        if word.startswith("if"):
            is_kept.append(all(is_kept) and _holds(word, condition, defined))
        elif word == "endif":
            is_kept.pop()
        elif all(is_kept[:-1]):  # else a whole condition is left out, whatever its parts say
            if word != "else":
                raise ValueError(f"#{word}{condition}: write #else and another #if")
            is_kept[-1] = not is_kept[-1]


def _holds(word: str, condition: str, defined: set[str]) -> bool:
    names = [_CONDITION.fullmatch(part) for part in condition.split("||")]
    if word != "if" or None in names:
        raise ValueError(f"#{word}{condition}: write #if defined(A), or #if defined(A) || ...")
    return any(name is not None and name[1] in defined for name in names)


def _for_gpu(text: str) -> str:
    """Return the text without the macros' arguments that are for the host, and without macros."""
    parts: list[str] = []
    open_brackets: list[str] = []  # "(", or who gets the arguments of the macro that is open
    place = 0
    for token in _TOKEN.finditer(text):
        executor, bracket = token["executor"], token["bracket"]
        if executor is None and bracket is None:
            continue
        is_macros = executor is not None or (bracket == ")" and open_brackets[-1] != "(")
        if "HOST" not in open_brackets:
            parts.append(text[place : token.start() if is_macros else token.end()])
        place = token.end()
        if bracket == ")":
            open_brackets.pop()
        else:
            open_brackets.append(executor or "(")
    without = "".join([*parts, text[place:]])
    return re.sub(r"[ \t]+$", "", re.sub(r"^[ \t]+\n", "", without, flags=re.M), flags=re.M)


def _with_values(text: str) -> str:
    """Return the text with the value for each Config::kName: Config's own, or RuntimeConfig's."""
    values = {name: value for body in _CONFIG.findall(text) for name, value in _VALUE.findall(body)}
    return _USE.sub(lambda use: values.get(use[1], use[0]), text)
