"""How a rank's session begins: the parts are built, and the run goes to where it stands."""

import json
import platform
import sys
from typing import Any

import torch

from onecurve import __version__
from onecurve.checkpoint import Manifest
from onecurve.checkpoint.background import Checkpointer
from onecurve.checkpoint.mirror import Mirror
from onecurve.errors import ConfigError
from onecurve.launch import RankContext
from onecurve.launch.ranks import GROUP_MARGIN_SECONDS
from onecurve.launch.torchrun import under_torchrun
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.report.console import Progress
from onecurve.train import saves
from onecurve.train.guard import Guard
from onecurve.train.numerics import differences, environment
from onecurve.train.parts import new_held_out, new_loader, new_model, new_schedule
from onecurve.train.plan import Plan
from onecurve.train.recorder import Recorder
from onecurve.train.records import write_json
from onecurve.train.restore import newest, restore
from onecurve.train.session import Session


def open_session(plan: Plan, context: RankContext) -> Session:
    """Build the model and its optimizer, and go to where the run stands. Collective."""
    config = plan.config
    # The launcher's watchdog speaks first: it can tell which rank is at fault.
    patience = config.limits.stall_seconds + GROUP_MARGIN_SECONDS
    mesh = Mesh(dp=config.layout.dp, transport=config.layout.transport, limit=patience)
    model = new_model(config)
    replicate(model, mesh)
    rates, train = config.optimizer, config.train
    optimizer = ZeroOptimizer(
        model,
        mesh,
        stage=config.layout.zero,
        leaves=train.leaves,
        accumulate=train.accumulate,
        betas=rates.betas,
        eps=rates.eps,
        weight_decay=rates.weight_decay,
        clip=rates.clip,
    )
    saver = Checkpointer(
        plan.folder / "checkpoints",
        optimizer,
        background=config.checkpoint.background,
        keep=config.checkpoint.keep,
        fence=plan.fence,
        mirror=Mirror(config.checkpoint.mirror, keep=config.checkpoint.keep) if config.checkpoint.mirror else None,
        alive=context.alive,
        patience=config.limits.stall_seconds,
    )
    session = Session(
        plan=plan,
        context=context,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        loader=new_loader(config),
        held_out=new_held_out(config),
        schedule=new_schedule(config),
        guard=Guard(config.guard.spike_factor, config.guard.max_rollbacks),
        saver=saver,
        recorder=Recorder(plan.folder, context, train.steps, plan.quiet, new_lines(plan, mesh)),
        numerics=environment(config),
    )
    compare_ranks(session)
    go_where_it_stands(session)
    return session


def go_where_it_stands(session: Session) -> None:
    """Restore the newest checkpoint of a run that goes on; else begin. Collective."""
    plan, recorder = session.plan, session.recorder
    manifest = restore(session, newest(session) if plan.resume else None)
    session.pending_row = manifest.guard.get("pending_row") if manifest else None
    recorder.keep_rows(session.step - 1 if session.pending_row else session.step)
    if session.leader:
        write_run_record(session)
    recorder.event("resume" if manifest else "start", session.step, layout=plan.config.layout.model_dump())
    if manifest is not None:
        check_numerics(session, manifest)
        recorder.say(f"resumed at step {manifest.step} of {plan.config.train.steps}")
    elif plan.resume:
        how = f"again from the parent's state, {plan.parent}" if plan.parent_digest else "fresh"
        recorder.say(f"no checkpoint to resume from: starting {how}")
    if manifest is None and plan.parent_digest:
        saves.save(session)
        saves.drain(session)  # a copy of its own, before the first step: the other run may change or be removed


def new_lines(plan: Plan, mesh: Mesh) -> Progress | None:
    """Rank 0's line per step; on a terminal the launching process draws a bar instead."""
    wanted = mesh.rank == 0 and not plan.quiet and (under_torchrun() or not sys.stderr.isatty())
    return Progress(plan.config.train.steps, log_every=plan.config.observe.log_every) if wanted else None


def write_run_record(session: Session) -> None:
    """run.json: what this curve is and where it runs now."""
    plan, optimizer = session.plan, session.optimizer
    record = {
        **plan.identity(session.loader.fingerprint),
        "parameters": sum(spec.numel for spec in optimizer.table.parameters),
        "layout": plan.config.layout.model_dump() | {"transport": session.mesh.transport_name},
        "numerics": session.numerics,
        "versions": {"onecurve": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    write_json(plan.folder / "run.json", record)


def compare_ranks(session: Session) -> None:
    """Compare the environments of the ranks, which must all be rank 0's: one curve has one arithmetic. Collective."""
    mine = json.dumps(session.numerics, sort_keys=True).encode()
    first, *others = map(json.loads, session.mesh.share(mine))
    odd = {rank: found for rank, other in enumerate(others, 1) if (found := differences(first, other))}
    if odd:
        changed = [*dict.fromkeys(phrase for found in odd.values() for phrase in found)]
        ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        text = f"the numeric environment of {ranks} is not that of rank 0: {'; '.join(changed)}"
        record_or_refuse(session, text, changed, "give all ranks the same", ranks=[*odd])


def check_numerics(session: Session, manifest: Manifest) -> None:
    """Compare the environment with the checkpoint's."""
    changed = differences(manifest.numerics, session.numerics)
    if changed:
        text = f"the numeric environment changed since step {manifest.step}: {'; '.join(changed)}"
        record_or_refuse(session, text, changed, "resume where it was")


def record_or_refuse(session: Session, text: str, changed: list[str], cure: str, **details: Any) -> None:
    """What numerics.on_change says: go on and say so, or refuse."""
    if session.config.numerics.on_change == "refuse":
        other = 'set numerics.on_change = "record" in the run\'s config.toml'
        raise ConfigError(f'{text}; numerics.on_change = "refuse": {cure}, or {other}')
    session.recorder.say(f"{text}; the run goes on, its bits may differ from here")
    session.recorder.event("numerics", session.step, changed=changed, **details)
