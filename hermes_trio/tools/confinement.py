"""Chooses the confinement profile and the directories of a command: the rules of `[tools.confinement]`, applied to a turn."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from hermes_trio.base.settings import SettingsError
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.core import SUBAGENT
from hermes_trio.runtime.turn import Turn

from .context import ToolContext
from .session_folders import SessionFolders
from .settings import ConfinementSettings, ToolSettings
from .warden import JobGroups, Profile, Protections, Sandbox, SandboxPaths, Workspace
from .warden.daemon.wire import Confinement

logger: Final = logging.getLogger("hermes_trio.tools.confinement")

WEBHOOK: Final = "webhook"
EVERY_TENANT: Final = "*"


@final
class CommandConfinement:
    """Decides for every command of one toolbox. `sandbox` knows the machine's protections, `settings` the operator's rules."""

    def __init__(self, sandbox: Sandbox, settings: ToolSettings, *, cwd: str, sessions: str) -> None:
        self.sandbox = sandbox
        self.cwd = cwd
        """The working directory of a session that has no directory of its own."""
        self._settings = settings
        self.folders = SessionFolders(sessions)
        """The directories of sessions that have one of their own."""

    @property
    def rules(self) -> ConfinementSettings:
        """`[tools.confinement]`."""
        return self._settings.confinement

    async def place(self, turn: Turn | None) -> ToolContext:
        """Return the context of a tool call, with the profile of its commands. Raises `NoRuntime` outside of any runtime."""
        await self.sandbox.ready()
        place = ToolContext.of(turn)
        profile = self.profile_of(turn, place.context, place.owner.tenant)
        return msgspec.structs.replace(place, profile=profile, confined=self.sandbox.confines(profile))

    def profile_of(self, turn: Turn | None, context: SessionContext, tenant: str) -> Profile:
        """Return the profile of a session's commands. A named key or tenant has its own.

        For other tenants it is the narrower one of the platform's and the tenants'.
        """
        rules = self.rules
        profile = rules.platforms.get(context.platform, rules.profile)
        if context.platform == WEBHOOK:
            profile = rules.routes.get(context.user_name, profile)
        if tenant:
            named = rules.tenants.get(tenant)
            profile = named or profile.narrowed(rules.tenants.get(EVERY_TENANT, Profile.WORKSPACE))
        profile = rules.keys.get(context.key_id, profile) if context.key_id else profile
        if turn is not None and turn.spec.source == SUBAGENT and self._settings.delegation.profile is not None:
            profile = profile.narrowed(self._settings.delegation.profile)
        return profile

    def profile_of_turn(self, turn: Turn) -> Profile:
        """Return the profile of a turn's commands."""
        return self.profile_of(turn, turn.context, turn.spec.tenant)

    def folder_of(self, place: ToolContext) -> str:
        """Return the directory of a session: one of its own if the settings or its profile say so. Creates it if it is missing."""
        mode = self._settings.terminal.workspace
        if mode == "shared" or (mode == "auto" and not place.profile.confines_files):
            return self.cwd
        return self.folders.make(place.session_id, "work")

    def plan(self, place: ToolContext, root: str) -> Confinement | None:
        """Return the rules for a command of this session. Raises `SpawnFailed` if they cannot be enforced."""
        if not place.profile.confines_files:
            return self.sandbox.plan(place.profile)
        return self.sandbox.plan(place.profile, Workspace(root, self.folders.make(place.session_id, "tmp")))

    def environment(self, place: ToolContext, root: str) -> dict[str, str]:
        """Return the variables that a command in a workspace gets instead of the server's."""
        if not place.profile.confines_files:
            return {}
        protections, own = self.sandbox.protections, self.folders.make(place.session_id, "tmp")
        replaced = protections is not None and protections.mount and not Workspace(root).lies_below("/tmp")
        return {"HOME": root, "TMPDIR": "/tmp" if replaced else own}

    def warnings(self) -> list[str]:
        """Return warnings for the start: protections that commands should have and this machine does not offer."""
        protections = self.sandbox.protections
        if protections is None or self.rules.profile is Profile.OFF:
            return []
        return [
            f"commands are not fully confined: {problem} (hermes-trio doctor says more)"
            for problem in (*protections.missing, *self._group_problems)
        ]

    @property
    def _group_problems(self) -> list[str]:
        return [self.sandbox.groups.problem] if self.sandbox.groups.problem else []

    def describe(self) -> dict[str, object]:
        """Return how commands are confined, for `/health/detailed` and `doctor`."""
        protections = self.sandbox.protections
        if protections is None:
            return {"status": "ok", "profile": str(self.rules.profile), "detail": "not asked yet"}
        report = confinement_report(self.rules.profile, protections)
        groups = self.sandbox.groups
        if groups.root:
            report["cgroup"] = ", ".join(groups.controllers) or "cgroup.kill"
        if groups.problem:
            report["status"] = "degraded"
            report["missing"] = [*protections.missing, groups.problem]
        words = confinement_lines(self.rules.profile, protections)
        words += [f"commands: degraded: {groups.problem}"] if groups.problem else []
        return {**report, "words": words}


def confinement_report(profile: Profile, protections: Protections) -> dict[str, object]:
    """Return what a profile enforces on this machine: `status` is ok or degraded, `missing` says why."""
    if profile is Profile.OFF:
        switched_off = (
            "confinement is switched off (tools.confinement.profile): commands may do whatever the server may"
        )
        return {"status": "ok", "profile": str(profile), "detail": switched_off}
    missing = protections.missing
    return {
        "status": "degraded" if missing else "ok",
        "profile": str(profile),
        "offers": {str(one): protections.offers(one) for one in Profile},
        **({"missing": missing} if missing else {}),
    }


def confinement_lines(profile: Profile, protections: Protections) -> list[str]:
    """Return how commands are confined on this machine, as text: one line, and one for each missing protection."""
    report = confinement_report(profile, protections)
    if profile is Profile.OFF:
        return [f"commands: {report['detail']}"]
    spaces = [name for name in ("mount", "pid", "network") if getattr(protections, name)]
    kind = " in a user namespace" if protections.user else " as root" if protections.root else ""
    active = [f"{', '.join(spaces)} namespaces{kind}"] if spaces else []
    active += [f"Landlock {protections.landlock}"] if protections.landlock else []
    lines = [f"commands: profile {profile}, {report['status']}; active: {'; '.join(active) or 'nothing'}"]
    lines += [f"commands: degraded: {problem}" for problem in protections.missing]
    lines += [f"commands: to fix it, {protections.advice}"] if protections.missing and protections.advice else []
    if protections.root:
        lines.append(
            "commands: the server runs as root, whose files protect does not keep from commands; run it as a user of its own"
        )
    return lines


def group_line(groups: JobGroups) -> str:
    """Describe, for people, whether each command has a control group of its own."""
    if not groups.root:
        return f"commands: no control group of their own: {groups.problem}"
    limited = " and ".join(groups.controllers)
    return f"commands: a control group of their own below {groups.root}" + (
        f", which can limit {limited}" if limited else ", which has no controllers: it can only be killed as a whole"
    )


def open_confinement(
    settings: ToolSettings,
    environment: Mapping[str, str],
    *,
    home: Path | None = None,
    config: Path | None = None,
    secrets: Sequence[str] = (),
    sockets: Sequence[str] = (),
    protections: Protections | None = None,
) -> CommandConfinement:
    """Return the rules for the commands of a gateway whose state is in `home`. Raises `SettingsError` for a working directory inside it.

    `secrets` and `sockets` are the files and sockets with which the gateway logs in elsewhere; commands do not see them.
    """
    rules = settings.confinement
    paths = SandboxPaths(
        home="" if home is None else str(home),
        secrets=tuple(_absolute(path) for path in (*rules.hide, *secrets, *(() if config is None else (str(config),)))),
        read_only=tuple(map(_absolute, rules.read_only)),
        readable=tuple(map(_absolute, rules.readable)),
        shown=tuple(map(_absolute, rules.show)),
        sockets=tuple(sockets),
    )
    # Only for a gateway: a program that embeds the tools manages its control group itself.
    groups = JobGroups() if home is None else JobGroups.open(rules.limits)
    sandbox = Sandbox(paths, rules.limits, environment=environment, protections=protections, groups=groups)
    return CommandConfinement(
        sandbox,
        settings,
        cwd=_working_directory(sandbox, settings.terminal.cwd, environment),
        sessions=_session_folder(sandbox, settings.terminal.session_folder, environment),
    )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _working_directory(sandbox: Sandbox, configured: str, environment: Mapping[str, str]) -> str:
    if configured:
        path = _absolute(configured)
        if sandbox.inside_home(path):
            raise SettingsError(
                f"tools.terminal.cwd is {configured!r}, which is inside the gateway's home, which commands cannot see;"
                " choose a directory outside it"
            )
        return path
    for path in (os.getcwd(), environment.get("HOME", "")):
        if path and os.path.isdir(path) and not sandbox.inside_home(path):
            return path
    return tempfile.gettempdir()


def _session_folder(sandbox: Sandbox, configured: str, environment: Mapping[str, str]) -> str:
    if configured:
        path = _absolute(configured)
        if sandbox.inside_home(path):
            raise SettingsError(
                f"tools.terminal.session_folder is {configured!r}, which is inside the gateway's home; choose a directory outside it"
            )
        return path
    home = environment.get("HOME", "")
    state = environment.get("XDG_STATE_HOME", "") or (os.path.join(home, ".local", "state") if home else "")
    if state and not sandbox.inside_home(state):
        return os.path.join(state, "hermes-trio-sessions")
    return os.path.join(tempfile.gettempdir(), f"hermes-trio-sessions-{os.getuid()}")
