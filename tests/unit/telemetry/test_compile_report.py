import torch

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
