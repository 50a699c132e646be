"""Programs judged by their words alone: each row says which words of which programs need approval, and in which category.

A pattern is searched in the arguments joined by blanks, and in the arguments behind the global options, so that `^push` finds `git -C . push`.
`^< ` finds those of a program that is given something to read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from hermes_trio.guard.options import listed, scan
from hermes_trio.guard.verdict import Category

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

_GLOBAL: Final = listed(
    "-C -c -n -H -R -p --git-dir --work-tree --namespace --exec-path --config-env --context --host --repo --profile "
    "--region --project --prefix --cwd --kubeconfig --log-level --machine -M --signal --type"
)
_SERVICE: Final = (
    r"\b(?:stop|restart|disable|mask|kill|try-restart|condrestart|force-reload|reload-or-restart|isolate|unload|bootout"
    r"|kickstart|remove|delete|shutdown)\b"
)

_ROWS: Final = (
    # deletes
    ("rimraf trash trash-put trash-rm trash-empty", r"", Category.RECURSIVE_DELETE, "deletes files or folders"),
    ("gio", r"^(?:trash|remove)", Category.RECURSIVE_DELETE, "deletes files or folders"),
    ("tar", r"--remove-files", Category.RECURSIVE_DELETE, "deletes what it packs"),
    ("shred gshred", r"", Category.DATA_LOSS, "overwrites files so that they cannot be restored"),
    ("truncate", r"-s ?0\b|--size[= ]0\b", Category.DATA_LOSS, "empties files"),
    ("cp", r"(?:^| )/dev/null ", Category.DATA_LOSS, "empties files"),
    # the machine
    ("service rc-service supervisorctl launchctl pm2 initctl", _SERVICE, Category.SERVICE_CONTROL, "stops, restarts or disables a service"),
    ("iptables ip6tables ufw nft", r"-[FXP]\b|\b(?:disable|reset|flush|delete)\b", Category.SERVICE_CONTROL, "opens the firewall"),
    ("userdel deluser groupdel delgroup", r"", Category.DATA_LOSS, "removes an account"),
    ("swapoff umount rmmod insmod", r"", Category.SERVICE_CONTROL, "changes the running system"),
    ("mount sysctl modprobe", r"remount|-\w*[wr]\b|=", Category.SERVICE_CONTROL, "changes the running system"),
    # git and other histories
    ("git",
     r"^reset\b.*--ha|^clean\b(?=.* (?:-\w*f|--f))(?!.* (?:-\w*n|--dry))|^branch\b.* (?:-\w*D|(?:-d|--delete)\b.*-f|-\w*f\w* .*-d)|^stash (?:clear|drop)"
     r"|^branch\b(?=.*--delete)(?=.*--force)|^(?:checkout|switch)\b.*(?: -f\b| --force| --discard)"
     r"|^(?:checkout|restore)\b(?!.*--staged(?!.*--worktree)).* (?:\.|:/|\*)(?: |$)"
     r"|^reflog (?:expire|delete)|^update-ref\b.* -d\b|^filter-(?:branch|repo)|^gc\b.*--prune=(?:now|all)|^worktree remove\b.* (?:-f|--force)|^rm\b.* -\w*[rf]"
     r"|^read-tree\b.*--reset",
     Category.GIT_DISCARD, "discards work that cannot be brought back easily"),
    ("git", r"^push\b.* (?:-\w*[fd]\w*|--force\S*|--mirror|--prune|--delete|[+:]\S+)(?: |$)", Category.GIT_FORCE_PUSH,
     "the push overwrites or deletes branches of others"),
    ("git", r"^push\b.* (?:\w+://|[\w.-]+@[\w.-]+:)", Category.UPLOAD, "pushes to an address instead of a named remote"),
    ("git", r"(?i)^config\b(?!.*--(?:get|list|unset)).*(?:core\.(?:hookspath|pager|editor|sshcommand|fsmonitor)|alias\.\S+ !|url\.|credential\.)",
     Category.PERSISTENCE, "makes git run or reach something else from now on"),
    ("gh", r"^(?:repo|release|secret|variable|gist|ssh-key|run|cache|label|issue) delete", Category.DATA_LOSS, "deletes on the forge"),
    ("hg svn", r"^(?:strip|delete|del|remove|rm)\b", Category.GIT_DISCARD, "discards history"),
    # code from elsewhere
    ("pip pip3 pipx uv poetry", r"\b(?:install|add)\b.*(?:git\+|https?://)", Category.REMOTE_CODE, "installs code from an address"),
    ("npm npx yarn pnpm bun bunx", r"(?:^|(?:install|i|add|dlx|exec)\b.* )(?:git\+|https?://)", Category.REMOTE_CODE, "installs or runs code from an address"),
    ("go", r"^(?:run|install)\b.*\S+\.\S+/\S+@", Category.REMOTE_CODE, "runs downloaded code"),
    ("socat", r"(?i)\b(?:exec|system):", Category.REMOTE_CODE, "connects a program to the network"),
    # privilege
    ("su pkexec doas visudo usermod useradd adduser groupadd gpasswd passwd chpasswd setcap nsenter unshare capsh chroot", r"",
     Category.PRIVILEGE, "runs as, or creates, a user with other rights"),
    ("chmod", r"(?:^| )(?:[ugo]*[+=][rwxX]*s|0?[2467][0-7]{3}\b)", Category.PRIVILEGE, "makes a program run with its owner's rights"),
    ("install", r"(?:-m|--mode)[= ]?0?[2467][0-7]{3}\b", Category.PRIVILEGE, "makes a program run with its owner's rights"),
    ("docker podman nerdctl",
     r"^(?:run|exec|create)\b.* (?:--privileged|--pid[= ]host|(?:-v|--volume)[= ]/:|\S*docker\.sock|(?:-\w*u|--user)[= ]?(?:0|root)\b)",
     Category.PRIVILEGE, "gives a container the rights of this machine"),
    ("gcore", r"", Category.PRIVILEGE, "looks into another process"),
    ("gdb strace ltrace", r"(?:^| )(?:-p|--pid|--attach)\b|^[^ a-z-]+$", Category.PRIVILEGE, "looks into another process"),
    # credentials
    ("gpg gpg2", r"--export-secret", Category.CREDENTIAL_READ, "prints private keys"),
    ("ssh-keygen", r"(?:^| )-y", Category.CREDENTIAL_READ, "reads a private key"),
    ("gh gcloud az", r"\b(?:auth|account) (?:token|print-\S+|get-access-token)|print-\S+-token", Category.CREDENTIAL_READ, "prints a token"),
    ("aws", r"^configure (?:get|export)|get-(?:session-token|secret-value|login-password)|--with-decryption", Category.CREDENTIAL_READ, "prints a secret"),
    ("kubectl oc", r"^(?:get|describe) secrets?\b|/serviceaccount/token", Category.CREDENTIAL_READ, "prints a secret"),
    ("vault pass op bw security secret-tool", r"^(?:kv get|read|show|item get|get|find-|dump|export|lookup|search|token)",
     Category.CREDENTIAL_READ, "prints a secret"),
    ("grep egrep fgrep rg ag ack",
     r"(?i)(?:passw|secret|token|api.?key|credential|private.key)\S* (?:.* )?(?:~|/home/\w+|/root|/etc|/)(?:/\.\S*|/?$)",
     Category.CREDENTIAL_READ, "searches for secrets outside of the project"),
    ("printenv", r"(?i)token|secret|passw|key", Category.CREDENTIAL_READ, "prints a secret"),
    ("git", r"^credential(?:-\w+)? (?:fill|get)", Category.CREDENTIAL_READ, "prints a password"),
    # data that leaves
    ("aws", r"^s3 (?:cp|mv|sync) (?!s3:)\S+.* s3://", Category.UPLOAD, "sends files to another host"),
    ("gsutil gcloud", r"\b(?:cp|rsync|mv) (?!gs:)\S+.* gs://", Category.UPLOAD, "sends files to another host"),
    ("rclone", r"^(?:copy|copyto|sync|move)\b.* \w+:", Category.UPLOAD, "sends files to another host"),
    ("gh", r"^gist create", Category.UPLOAD, "publishes files"),
    ("npm yarn pnpm twine cargo gem poetry docker podman", r"^(?:publish|upload|push)\b", Category.UPLOAD, "publishes a package or an image"),
    ("mutt mailx mail", r"(?:^| )-[aA] ", Category.UPLOAD, "mails a file"),
    ("mutt mailx mail sendmail ssh sftp ftp", r"^< ", Category.UPLOAD, "sends what it is given to another host or person"),
    ("openssl", r"^< .*\bs_client", Category.UPLOAD, "sends what it is given to another host"),
    ("scp", r"(?:^| )-\w*r.* (?!/|\.)[\w.@-]+:\S*$", Category.UPLOAD, "sends a folder to another host"),
    ("rsync", r"(?:^| )(?!-)[^ :]+ (?:(?!/|\.)[\w.@-]+::?|rsync://)\S*$", Category.UPLOAD, "sends files to another host"),
    ("ssh autossh", r"(?:^| )-\w*R", Category.UPLOAD, "opens this machine to another host"),
    ("ngrok bore localtunnel", r"", Category.UPLOAD, "opens this machine to the internet"),
    ("cloudflared", r"^tunnel", Category.UPLOAD, "opens this machine to the internet"),
    ("dig nslookup host ping", r"[\uf8e0\uf8e1]\S*\.|-p [\uf8e0\uf8e1]", Category.UPLOAD, "sends data in a name or a packet"),
    # what outlives the session
    ("ssh-copy-id update-ca-certificates", r"", Category.PERSISTENCE, "opens access to this machine from now on"),
    ("systemctl", r"^(?:--user )?(?:enable|link|edit)\b", Category.PERSISTENCE, "starts a program with the machine"),
    ("systemd-run", r"--on-|--timer", Category.PERSISTENCE, "starts a program later"),
    ("at batch", r"", Category.PERSISTENCE, "starts a program later"),
    ("launchctl", r"^(?:load|bootstrap|enable)", Category.PERSISTENCE, "starts a program with the machine"),
    ("tmux screen", r"^new\S* .*-\w*d|(?:^| )-\w*d\w*m", Category.PERSISTENCE, "starts a program that outlives the session"),
    ("pip pip3 npm yarn pnpm", r"^config\b.* set\b|^config set\b", Category.PERSISTENCE, "changes where packages come from"),
    ("journalctl", r"--vacuum|--rotate", Category.PERSISTENCE, "removes logs"),
    ("history", r"-\w*c", Category.PERSISTENCE, "removes the history"),
    # databases, clusters and clouds
    ("redis-cli", r"(?i)\bflush(?:all|db)\b", Category.DATA_LOSS, "empties a database"),
    ("mongo mongosh", r"drop\w*\(|delete(?:Many|One)\(|remove\(", Category.DATA_LOSS, "deletes from a database"),
    ("python python3", r"manage\.py (?:flush|reset_db)", Category.DATA_LOSS, "empties a database"),
    ("rails rake", r"\bdb:(?:drop|reset|purge)", Category.DATA_LOSS, "empties a database"),
    ("prisma alembic", r"migrate reset|--force-reset|downgrade base", Category.DATA_LOSS, "empties a database"),
    ("etcdctl influx kafka-topics kafka-topics.sh", r"^del|--delete\b", Category.DATA_LOSS, "deletes stored data"),
    ("terraform tofu pulumi vagrant", r"\bdestroy\b", Category.DATA_LOSS, "destroys machines"),
    ("kubectl oc", r"^scale\b.*--replicas[= ]0", Category.CONTAINER_CONTROL, "stops workloads of a cluster"),
    ("helm", r"^(?:uninstall|delete)\b", Category.CONTAINER_CONTROL, "removes workloads of a cluster"),
    ("aws gcloud gsutil az rclone", r"(?:^| )(?:rm|rb|purge|delete|terminate|delete-\S+|terminate-\S+|purge-\S+)(?: |$)",
     Category.DATA_LOSS, "deletes in the cloud"),
    ("heroku fly flyctl vercel netlify railway", r":(?:destroy|delete|reset)|\bdestroy\b|^(?:remove|rm|delete)\b", Category.DATA_LOSS, "deletes in the cloud"),
    ("npm yarn pnpm cargo", r"^(?:unpublish|yank)", Category.DATA_LOSS, "takes a published package away"),
    ("ansible", r"-a\b|--args", Category.REMOTE_CODE, "runs a command on other machines"),
    # the gateway
    ("hermes-trio hermes", r"^(?:stop|restart|update|upgrade|uninstall|kill|keys|pair|config|serve|doctor --fix)", Category.GATEWAY_CONTROL,
     "stops, restarts or changes this gateway"),
    ("python python3", r"-m hermes_trio (?!--help|--version|status)", Category.GATEWAY_CONTROL, "controls this gateway"),
    ("systemctl service rc-service supervisorctl launchctl pm2 initctl docker podman docker-compose",
     r"^(?=.*hermes).*" + _SERVICE + r"|^(?=.*hermes).*\b(?:down|rm)\b",
     Category.GATEWAY_CONTROL, "stops or restarts this gateway"),
    ("pip pip3 pipx uv", r"\b(?:install|uninstall|remove|upgrade|update|reinstall)\b.* hermes[-_]trio(?![\w/.])", Category.GATEWAY_CONTROL,
     "replaces or removes this gateway's package"),
)  # fmt: skip

_WORDS: Final[dict[str, list[tuple[re.Pattern[str], Category, str]]]] = {}
for _names, _pattern, _category, _description in _ROWS:
    for _name in _names.split():
        _WORDS.setdefault(_name, []).append((re.compile(_pattern), _category, _description))


def judge_words(call: Call) -> None:
    """Flag what the rows of this program find."""
    rows = _WORDS.get(call.name)
    if rows is None or call.arguments in (["--help"], ["--version"], ["-h"]):
        return
    texts = [" ".join(call.arguments), " ".join(scan(call.arguments, _GLOBAL, permute=False).operands)]
    if call.stdin is not None:
        texts.append(f"< {texts[0]}")
    for pattern, category, description in rows:
        if any(map(pattern.search, texts)):
            call.flag(category, description)
