"""The lines of bert_dp's page for data of one's own: each runs as it is written, on small files of these names."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from examples.bert_dp.reviews import SHIPPED
from tests.conftest import ROOT, Programs
from tests.docs.markdown import shell_blocks
from tests.examples.bert_jobs import shipped
from tests.runs import result

(LINES,) = (
    block.commands
    for block in shell_blocks((ROOT / "examples" / "bert_dp" / "README.md").read_text())
    if "path/to/bert-base-chinese" in block.code
)


@pytest.mark.timeout(300)
def test_the_lines_for_other_data_run(programs: Programs, tmp_path: Path) -> None:
    """What a model of this size learns is of no interest; a model and a vocabulary that are given are those used."""
    frame = pd.read_csv(SHIPPED)
    few = pd.concat([part.head(20) for _, part in frame.groupby("label")])
    few.to_csv(tmp_path / "ChnSentiCorp_htl_all.csv", index=False)
    few[["review"]].head(5).to_csv(tmp_path / "new_reviews.csv", index=False)
    bert, tokenizer, _, _ = shipped()
    folder = tmp_path / "path" / "to" / "bert-base-chinese"
    bert.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    hidden = []
    for line in LINES:
        python, *command = shlex.split(line)
        assert python == "python"
        programs.run(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
        if "predict" not in line and "trainer" not in line:
            hidden.append(
                re.findall(r'"hidden_size": (\d+)', (tmp_path / "runs/bert_dp/model/config.json").read_text())[0]
            )
            assert result(tmp_path / "runs" / "bert_dp")["train_samples"] == 36
    assert (hidden[0] == hidden[1] != "64", hidden[2]) == (True, "64")
    assert len(pd.read_csv(tmp_path / "predictions.csv")["prediction"].dropna()) == 5
    assert len(LINES) == 5
