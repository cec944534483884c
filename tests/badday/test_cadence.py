"""Row P1: checkpoints by wall clock as well as by steps; rank 0's clock decides for all."""

from onecurve.checkpoint import read_manifest


def test_by_minutes(new_run, reference):
    """Every 6 ms: some step is due, which one does not matter."""
    run = new_run("checkpoint.every_steps=0", "checkpoint.every_minutes=0.0001", "checkpoint.keep=100")
    assert run.train() == 0
    assert len(run.steps) > 2 and run.steps[-1] == 20
    assert all(len(read_manifest(run.checkpoint(step)).files) == 4 for step in run.steps)
    assert run.result() == reference()


def test_by_minutes_and_by_steps(new_run, reference):
    run = new_run("checkpoint.every_minutes=1000.0")
    assert run.train() == 0
    assert run.steps == [15, 20]
    assert run.result() == reference()


def test_off_only_the_last_step_is_saved(new_run):
    run = new_run("checkpoint.every_steps=0")
    assert run.train() == 0
    assert run.steps == [20]


def test_only_rank_0s_clock_counts(new_run):
    """Another rank whose clock has run away asks for nothing."""
    from onecurve.train import loop

    real = loop.votes

    def late(session):
        if not session.leader:
            session.saved_at -= 1e6
        return real(session)

    run = new_run("checkpoint.every_steps=0", "checkpoint.every_minutes=1000.0")
    assert run.train(before=lambda: setattr(loop, "votes", late)) == 0
    assert run.steps == [20]
