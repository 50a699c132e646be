"""Maps programs to the rules that judge them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .options import listed
from .rules import builtins, code, deletes, exec_options, files, git, machine, text, wrappers

if TYPE_CHECKING:
    from .call import Call

Rule = Callable[["Call"], "str | None"]

_TABLE: tuple[tuple[str, Rule], ...] = (
    ("rm grm srm", deletes.rm),
    ("unlink shred gshred", deletes.unlink),
    ("find gfind bfs", deletes.find),
    ("fd fdfind", deletes.fd),
    ("xargs gxargs parallel rush", deletes.xargs),
    ("rsync", deletes.rsync),
    ("mv gmv", deletes.move),
    ("mkfs mke2fs mkdosfs mkntfs newfs mkreiserfs", machine.make_filesystem),
    ("dd gdd dcfldd", machine.dd),
    ("fdisk sfdisk cfdisk gdisk sgdisk parted wipefs blkdiscard hdparm cryptsetup mkswap pvcreate vgremove lvremove "
     "diskutil badblocks nvme zpool zfs btrfs mdadm",
     machine.partition),
    ("shutdown reboot halt poweroff openrc-shutdown rtcwake", machine.power),
    ("init telinit", machine.init),
    ("systemctl", machine.systemctl),
    ("loginctl", machine.login_manager),
    ("dbus-send busctl gdbus qdbus", machine.message_bus),
    ("kill", machine.kill),
    ("pkill killall killall5 skill fuser xkill", machine.kill_by_name),
    ("pgrep pidof", machine.find_process),
    ("docker podman nerdctl docker-compose podman-compose", machine.container),
    ("kubectl oc", machine.kubectl),
    ("mktemp", text.temporary),
    ("nc ncat netcat telnet socat", files.netcat),
    ("chmod gchmod", files.chmod),
    ("chown chgrp gchown", files.chown),
    ("tee sponge gtee", files.tee),
    ("cp gcp install", files.copy),
    ("ln gln", files.link),
    ("mount", files.mount),
    ("truncate patch", files.write_operands),
    ("curl wget aria2c fetch http https", files.download),
    ("crontab", files.crontab),
    ("echo", text.echo),
    ("printf", text.printf),
    ("cat gcat bat pv tail head", text.cat),
    ("uniq cut tac paste fold fmt column nl strings iconv dos2unix grep egrep fgrep zcat gunzip gzip bunzip2 bzcat xz xzcat "
     "zstd gzcat jq yq uniq shuf od hexdump less more", text.transform),
    (" ".join(exec_options.NAMES), exec_options.with_exec_options),
    ("rev tr gtr", text.scramble),
    ("realpath readlink yes", text.prints_operands),
    ("base64 gbase64 base32 xxd openssl uudecode basenc", text.decode),
    ("which type whereis", text.which),
    ("hash", builtins.remember_path),
    ("ls gls dir", text.names_only),
    ("basename dirname", text.basename),
    ("pwd", text.working_directory),
    ("true false : test [ [[ exit return break continue wait sleep mkdir touch unset shopt ulimit umask getopts "
     "disown bg fg jobs let times enable history complete compgen compopt bind suspend logout local typeset", text.silent),
    ("aptitude dnf yum zypper pacman apk brew snap flatpak cargo go gem gh glab whatis apropos info "
     "help diff cmp file stat wc cmake ninja pytest ruff mypy vi nano code ps top df du free uname date cal id "
     "whoami hostname uptime lsof netstat ss ping dig nslookup traceroute tree locate nproc seq expr bc dc "
     "notify-send logger wall mail sendmail unzip 7z gpg ssh-keygen ssh-add terraform ansible helm",
     text.inert),
    ("sh bash dash zsh ksh mksh ash fish csh tcsh rbash rzsh yash posh pdksh", code.shell),
    ("eval", code.evaluate),
    (". source", code.source),
    ("python pypy perl ruby node nodejs bun deno php lua luajit rscript r osascript julia elixir groovy tclsh expect "
     "powershell pwsh cmd",
     code.interpreter),
    ("awk gawk mawk nawk", code.awk),
    ("sed gsed", code.sed),
    ("vim nvim ex ed view", code.editor),
    ("git", git.git),
    ("psql mysql mariadb sqlite3 sqlite sqlcmd clickhouse-client duckdb cockroach usql mycli pgcli litecli bq dropdb dropuser "
     "mysqladmin", git.sql_client),
    (" ".join(wrappers.NAMES), wrappers.wrapper),
    ("env genv", wrappers.env),
    ("sudo sudoedit", wrappers.sudo),
    ("command", wrappers.command),
    ("exec", wrappers.execute),
    ("watch entr", wrappers.joined),
    ("su runuser script flock at batch", wrappers.texted),
    ("tmux screen hyperfine concurrently watchexec nodemon capsh bwrap", wrappers.text_arguments),
    ("npm npx yarn pnpm bunx", wrappers.package_run),
    ("make gmake", wrappers.make),
    ("trap", wrappers.builtin_run),
    ("cd pushd popd chdir", builtins.change_directory),
    ("set", builtins.set_options),
    ("read mapfile readarray", builtins.read),
    ("alias", builtins.alias),
    ("export declare readonly", builtins.declare),
    ("shift", builtins.shift),
)  # fmt: skip

_RULES: dict[str, Rule] = {name: rule for names, rule in _TABLE for name in names.split()}
_VERSIONED = re.compile(r"(python|pypy|perl|ruby|lua|php|node)[\d.]+m?\Z")

RUNNERS = frozenset(
    listed("rm dd shred find xargs sh bash dash zsh ksh env sudo eval busybox python python3 perl ruby node mkfs")
)
"""Programs that a wrapper without a rule may be asked to run."""

ALL_NAMES = frozenset(
    listed(
        "rm dd shred find mkfs mkfs.ext4 shutdown reboot halt poweroff init telinit systemctl kill killall5 sh bash dash eval python3 perl sudo env "
        "busybox xargs tee cp mv chmod chown curl wget"
    )
)
"""Programs that a pattern in command position is compared with."""


def find_rule(name: str) -> Rule | None:
    """Return the rule for a program name in lower case; None for an unknown program."""
    rule = _RULES.get(name)
    if rule is not None:
        return rule
    if name.startswith("mkfs."):
        return machine.make_filesystem
    match = _VERSIONED.match(name)
    return None if match is None else _RULES[match.group(1)]
