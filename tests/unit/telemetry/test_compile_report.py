from types import SimpleNamespace

import torch

from shardline.telemetry import recompiles
from shardline.telemetry.recompiles import CompileReport


def test_what_is_compiled_again_is_named_with_its_reason():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def doubled(x):
        return 2 * x

    report = CompileReport()
    doubled(torch.zeros(3))
    assert report.lines(1, 0) == []  # the first steps compile, as they should
    assert report.lines(5, 0) == []
    doubled(torch.zeros(4))
    (line,) = report.lines(6, 0)
    assert "step 6: doubled was compiled again" in line
    assert "expected 3, actual 4" in line
    assert report.lines(7, 0) == []


def test_a_resumed_run_may_compile_in_its_own_first_steps(monkeypatch):
    compiled = [SimpleNamespace(co_name="first")]
    monkeypatch.setattr(recompiles, "_compilations", lambda: compiled)
    report = CompileReport()
    for step in (101, 102, 103):
        compiled.append(SimpleNamespace(co_name=f"in_step_{step}"))
        said = [f"step {step}: in_step_103 was compiled again (first use)"]
        assert report.lines(step, 100) == (said if step == 103 else [])
