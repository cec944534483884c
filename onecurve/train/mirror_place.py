"""Whether a mirror is a place of its own: not a run's folder, and without another curve's copies."""

from pathlib import Path

from onecurve.checkpoint.lock import FENCE_NAME, LOCK_NAME
from onecurve.checkpoint.mirror import curves_at, local_folder
from onecurve.errors import InputError
from onecurve.paths import show
from onecurve.train.plan import Plan
from onecurve.urls import without_secrets

MARKS = ("run.json", LOCK_NAME, FENCE_NAME)


def check_mirror_place(plan: Plan) -> None:
    """Raises InputError where copies would meet checkpoints that are not this curve's copies. A mirror that can't be
    read now is no reason to refuse: copies are tried again later, and a resume that needs it says so."""
    url = plan.config.checkpoint.mirror
    if not url:
        return
    name = f"checkpoint.mirror = {without_secrets(url)!r}"
    place = local_folder(url)
    if place is not None:
        refuse_run_folders(name, place, plan.folder.resolve())
    strangers = sorted(curve[:8] for curve in curves_at(url) - {plan.curve_id})
    if strangers:
        curves = f"curve{'s' * (len(strangers) > 1)} {', '.join(strangers)}"
        raise InputError(
            f"{name}: it holds checkpoints of {curves}, this run's is {plan.curve_id[:8]}; give another mirror, or a "
            "folder of its own below this one"
        )


def refuse_run_folders(name: str, place: Path, run: Path) -> None:
    cure = "give a folder outside of every run"
    for inner, outer, relation in ((run, place, "holds"), (place, run, "lies in")):
        if any(same(above, outer) for above in (inner, *inner.parents)):
            how = "is" if same(place, run) else relation
            raise InputError(f"{name}: it {how} the folder of this run, {show(run)}; {cure}")
    for folder in (place, place.parent):
        if any((folder / mark).exists() for mark in MARKS):
            how = "is" if folder == place else "lies in"
            raise InputError(f"{name}: it {how} the folder of another run, {show(folder)}; {cure}")


def same(a: Path, b: Path) -> bool:
    """Whether both are one folder, whatever the names; one that isn't there yet is known by its name only."""
    return a == b or (a.exists() and b.exists() and a.samefile(b))
