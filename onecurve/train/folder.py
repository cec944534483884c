"""The run folder before the ranks start: which one it is, what it holds, whether that may be resumed."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from onecurve.checkpoint import (
    Fence,
    RunLock,
    clean_leftovers,
    find_checkpoint,
    latest_checkpoint,
    list_steps,
    parse_place,
    read_manifest,
)
from onecurve.checkpoint.errors import DamagedCheckpoint, NewerCheckpoint
from onecurve.checkpoint.lock import FENCE_NAME, LOCK_NAME
from onecurve.checkpoint.mirror import fetch_latest
from onecurve.checkpoint.reshard import check_fits
from onecurve.config import Config, config_to_toml, curve_part, make_config, resume_config
from onecurve.config_text import read_toml
from onecurve.curve import curve_id
from onecurve.data.text import keep_description
from onecurve.errors import ConfigError, InputError
from onecurve.paths import read_bytes, show
from onecurve.report.console import printable, say_on
from onecurve.report.plan import parameters
from onecurve.train.corpora import check_corpora
from onecurve.train.mirror_place import check_mirror_place
from onecurve.train.parts import new_loader
from onecurve.train.plan import Plan
from onecurve.train.preflight import preflight
from onecurve.train.records import replace_text, write_json
from onecurve.train.request import Request

RECORD_LIMIT = 1 << 20  # bytes of a run.json


def locate(request: Request, *, full_check: bool) -> Plan:
    """The plan of a new run of this request, without a fence: folder, curve and parent. `full_check` reads the whole
    corpus."""
    check_corpora(request.config)
    loader = new_loader(request.config, full_check=full_check)
    known = request.resume and request.run is not None and (request.run / "run.json").exists()  # its own record counts
    parent, digest = find_parent(request.config, request.from_) if request.from_ and not known else (None, "")
    identity = curve_id(request.config, loader.fingerprint, digest or None)
    folder = request.run or Path("runs") / f"{request.source.stem}-{identity[:8]}"
    return Plan(request.config, folder, identity, None, request.resume, parent, digest)


def prepare(request: Request, plan: Plan, *, ranks_here: int) -> Plan | None:
    """Make the locked folder ready for the ranks, `ranks_here` of them on this host. None: the run is finished.

    Raises InputError, in one line, for what can be known before step 1.
    """
    folder, notes = plan.folder, list[str]()
    begun = (folder / "run.json").exists()
    if not plan.resume and (begun or list_steps(folder / "checkpoints")):
        raise InputError(f"{folder} holds a run already; go on with it by --resume, or give another --run")
    if begun:
        plan, notes = resumed(plan, request.overrides)
    refuse_strangers(plan)
    check_mirror_place(plan)
    notes = [*clean_leftovers(folder / "checkpoints"), *notes]
    steps = plan.config.train.steps
    if plan.resume and (plan.config.checkpoint.mirror or newest_step(folder) >= steps):
        newest = newest_whole(plan)
        if newest is not None and is_end(newest, steps):
            tell(notes)
            say(f"{folder} is finished: all {steps} steps are done")
            return None
    preflight(plan, ranks_here)
    tell(notes)  # not before: a refusal is one line
    corpus = new_loader(plan.config).corpus
    if corpus.folder is not None and not begun:
        keep_description(corpus.folder, folder / "corpus")
    replace_text(folder / "config.toml", config_to_toml(plan.config))
    if not begun:  # from here on there is a run, whatever happens before its first checkpoint
        write_json(folder / "run.json", plan.identity(corpus.fingerprint))
    say(f"run folder {folder}")
    return plan


@contextlib.contextmanager
def leaving_nothing(folder: Path) -> Iterator[Fence]:
    """The lock of the run folder while the start is prepared and the run goes on. Where the start is refused, what was
    made for it is removed: the lock's files and the folders, unless they were there before or hold anything else."""
    made = [folder / name for name in (LOCK_NAME, FENCE_NAME) if not (folder / name).exists()]
    folders = [path for path in (folder, *folder.parents) if not path.exists()]
    with RunLock(folder) as fence:
        try:
            yield fence
        except InputError:
            if not (folder / "config.toml").exists():  # no run was there, and none was begun
                for path in made:
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for path in folders:
                        path.rmdir()
            raise


def resumed(plan: Plan, overrides: tuple[str, ...]) -> tuple[Plan, list[str]]:
    """The plan of a run that is there: its own curve, the layout given now; and what of the config is not applied.
    Raises InputError if its config or the data changed."""
    path = plan.folder / "config.toml"
    tables = read_toml(path, "put the config there that the run was started with, or start a new run in another --run")
    try:
        stored = make_config(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    record = read_record(plan.folder)
    fingerprint = new_loader(stored).fingerprint
    identity = curve_id(stored, fingerprint, record["parent"] or None)
    if identity != record["curve_id"]:
        cause, cure = why_another(stored, plan.config, record["data_fingerprint"], fingerprint)
        raise InputError(
            f"{plan.folder}: its curve is {record['curve_id'][:8]}, but what is there now makes {identity[:8]}: "
            f"{cause}; {cure}, or start a new run"
        )
    config, notes = resume_config(plan.config, stored, overrides)
    parent = Path(record["parent_path"]) if record["parent_path"] else None
    return replace(plan, config=config, curve_id=identity, parent=parent, parent_digest=record["parent"]), notes


def why_another(stored: Config, given: Config, recorded: str, found: str) -> tuple[str, str]:
    """Why a run's config and corpus make another curve than its record has, and the cure. The built-in corpus follows
    from the config alone."""
    if recorded != found and stored.data.source != "cycle":
        cause = f"the corpus {show(stored.data.source)} has the fingerprint {found[:16]}, the run's has {recorded[:16]}"
        return cause, "bring the corpus back (or data.source in config.toml)"
    mine, asked = curve_part(stored), curve_part(given)
    changed = [
        f"{section}.{key}" for section in mine for key in mine[section] if mine[section][key] != asked[section][key]
    ]
    keys = f" ({', '.join(changed)}: not as in the config given here)" if changed else ""
    return "its config.toml was edited", f"put back what it said{keys}"


def refuse_strangers(plan: Plan) -> None:
    """Raises ForeignCheckpoint if the folder holds a checkpoint of another curve: this run would come to that step and
    put its own in the place. What can't be read is left to `latest_checkpoint`, which names it and passes it over."""
    for found in list_steps(plan.folder / "checkpoints"):
        with contextlib.suppress(DamagedCheckpoint, NewerCheckpoint):
            read_manifest(found.path, curve_id=plan.curve_id)


def newest_whole(plan: Plan) -> Path | None:
    """The newest whole checkpoint; where there is none here, brought from the mirror. Raises MirrorFailed."""
    checkpoints, mirror = plan.folder / "checkpoints", plan.config.checkpoint.mirror
    path, _ = latest_checkpoint(checkpoints, curve_id=plan.curve_id, finite=True)
    if path is None and mirror:
        path, reasons = fetch_latest(mirror, checkpoints, curve_id=plan.curve_id, finite=True)
        for reason in reasons:
            say(f"passed over {reason}")
        if path is not None:
            say(f"no whole checkpoint here: fetched {path.name} from the mirror")
    return path


def read_record(folder: Path) -> dict[str, str]:
    """What run.json says of the curve. Raises InputError."""
    path, names = folder / "run.json", ("curve_id", "parent", "data_fingerprint")
    cure = "remove it and resume with the config that the run was started with, or start a new curve with --from"
    content = read_bytes(path, "record", cure, RECORD_LIMIT)
    try:
        record = json.loads(content)
        return {name: str(record[name]) for name in names} | {"parent_path": str(record.get("parent_path", ""))}
    except (ValueError, RecursionError, KeyError, TypeError):
        fault = f"is not JSON with {', '.join(names)}" if content.strip() else "is empty"
        raise InputError(f"record {show(path)}: it {fault}; {cure}") from None


def is_end(checkpoint: Path, steps: int) -> bool:
    """Whether it is that of the last step, with nothing put off by a stop."""
    manifest = read_manifest(checkpoint)
    return manifest.step >= steps and not manifest.guard.get("pending_row")


def find_parent(config: Config, place: str) -> tuple[Path, str]:
    """The checkpoint that "RUN[@STEP]" names, and its digest. Raises InputError if this model can't start there."""
    path = find_checkpoint(parse_place(place, "--from"), say)
    manifest = read_manifest(path)
    check_fits(manifest, parameters(config.model), f"--from {place}")
    return path, manifest.state_digest


def newest_step(folder: Path) -> int:
    """The newest step that has a checkpoint folder, by name; 0 without any."""
    return max((found.step for found in list_steps(folder / "checkpoints")), default=0)


def tell(notes: list[str]) -> None:
    for note in notes:
        say(note)


def say(text: str) -> None:
    say_on(sys.stderr, f"onecurve: {printable(text)}")
