"""A benchmark that is killed after its first batch leaves a result file with that batch."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks import common
from tests.support.programs import python

#: Every interpreter of the run reads this first: whichever process writes the result file ends by
#: SIGKILL as soon as that has been done once.
ENDS_AFTER_THE_FIRST_WRITE = """
import os, signal
replace = os.replace
def and_end(source, target, **options):
    replace(source, target, **options)
    if str(target).endswith("result.json"):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = and_end
"""

_COMM = "bench_moe_comm.py --ep_size 2 --profile custom --hidden_size 64 --top_k 2 --num_experts 4"
_COMM += " --batches 1 4 --iters 2 --warmup 0 --output_file PATH"
_RECIPES = "bench_recipes.py --ep-size 2 --hidden-size 128 --top-k 2 --num-experts 4 --tokens 1 4"
_RECIPES += " --combines --iterations 2 --warmup 0 --output_file PATH"
_HEAD = "bench_lm_head.py --groups 2 --vocab 256 --hidden 64 --rows 1 4 --iterations 2"
_HEAD += " --output_file PATH"


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "written_by_a_rank"),
    [
        (_COMM, True),
        (f"{_COMM} --device rehearsal --emulate_ranks 2", False),
        (f"{_RECIPES} --recipes mxfp8", False),
        (f"{_RECIPES} --recipes mxfp8 nvfp4 --device rehearsal", False),
        (_HEAD, True),
        (f"{_HEAD} --device rehearsal", False),
    ],
    ids=lambda given: given.split("_")[1].split(".")[0] if isinstance(given, str) else given,
)
def test_the_first_batch_is_left(command: str, written_by_a_rank: bool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDS_AFTER_THE_FIRST_WRITE)
    file = tmp_path / "out" / "result.json"
    script, *options = command.replace("PATH", str(file)).split()
    variables = {"PYTHONPATH": str(tmp_path)}
    done = python(f"benchmarks/{script}", *options, variables=variables)
    assert done.returncode == (1 if written_by_a_rank else -signal.SIGKILL), done.stderr
    assert list(file.parent.iterdir()) == [file]
    result = json.loads(file.read_text())
    assert result["incomplete"] == "the run had not ended when this was written"
    assert result["machine"]["command"].startswith(f"python benchmarks/{script} ")
    rows = result["rows"] if "rows" in result else result["groups"][0]["rows"]
    assert {row.get("tokens", row.get("rows")) for row in rows} == {1}
    if script == "bench_recipes.py" and not written_by_a_rank:
        assert not [row for row in rows if row["name"].startswith("nvfp4")], "one recipe a batch"


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    record = common.Record(file, {"machine": {}})
    assert record.write({"rows": [1]})["rows"] == [1]
    with pytest.raises(TypeError, match="not JSON serializable"):
        record.write({"rows": [1, object()]})
    assert json.loads(file.read_text())["rows"] == [1]
    monkeypatch.setattr(Path, "write_text", _half)
    with pytest.raises(OSError, match="no space"):
        record.write({"rows": [1, 2]})
    monkeypatch.undo()
    assert json.loads(file.read_text())["rows"] == [1]
    record.write({"rows": [1, 2]}, complete=True)
    assert json.loads(file.read_text()) == {"machine": {}, "rows": [1, 2]}


def _half(path: Path, text: str) -> int:
    path.write_bytes(text[: len(text) // 2].encode())
    raise OSError("no space")
