#!/bin/sh
# Run an SSH server in this distro: sshd.sh state|apply|undo PORT KEY
#
#   state  prints what is lacking, one word per line, and "end"; changes nothing
#   apply  provides what is lacking; the second time, nothing
#   undo   takes back what apply changed; the package openssh-server stays
#
# KEY is a public key in base64, or "-" for none. ROOT_DIR is another root, for tests.
set -eu

root=${ROOT_DIR:-}
port=$2
key=
[ "$3" = - ] || key=$(printf '%s' "$3" | base64 -d)
config=$root/etc/ssh/sshd_config.d/10-rackless.conf
wsl_conf=$root/etc/wsl.conf
mark='added by Rackless'
kept='# before Rackless: '

wanted_config() {
    printf '%s\n' '# Written by Rackless; its script for Windows removes it with -Undo.' \
        "Port $port" 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' \
        'PermitRootLogin no'
}

has_systemd() {
    awk -F= '
        { sub(/#.*/, "") }
        /^[ \t]*\[/ { section = tolower($0); gsub(/[][ \t\r]/, "", section) }
        section == "boot" && tolower($1) ~ /^[ \t]*systemd[ \t]*$/ {
            value = tolower($2); gsub(/[ \t\r]/, "", value); print value; exit
        }' "$wsl_conf" 2>/dev/null | grep -qx true
}

login_user() { # the one that wsl.exe starts: [user] default, else the first user
    name=$(awk -F= '
        /^[ \t]*\[/ { section = tolower($0); gsub(/[][ \t\r]/, "", section) }
        section == "user" && tolower($1) ~ /^[ \t]*default[ \t]*$/ {
            gsub(/[ \t\r]/, "", $2); print $2; exit
        }' "$wsl_conf" 2>/dev/null || true)
    [ -n "$name" ] || name=$(awk -F: '$3 >= 1000 && $3 < 60000 { print $1; exit }' "$root/etc/passwd")
    printf '%s' "$name"
}

keys_file() {
    awk -F: -v name="$(login_user)" '$1 == name { print $6 "/.ssh/authorized_keys"; exit }' \
        "$root/etc/passwd"
}

has_key() {
    [ -n "$key" ] || return 0
    body=$(printf '%s' "$key" | cut -d ' ' -f 1,2)
    grep -qF "$body" "$root$(keys_file)" 2>/dev/null
}

lacking() {
    [ -x "$root/usr/sbin/sshd" ] || echo openssh-server
    [ "$(cat "$config" 2>/dev/null)" = "$(wanted_config)" ] || echo settings
    has_systemd || echo systemd
    has_key || echo key
}

set_systemd() {
    touch "$wsl_conf"
    awk -v mark="# $mark" -v kept="$kept" '
        /^[ \t]*\[/ {
            section = tolower($0); sub(/#.*/, "", section); gsub(/[][ \t\r]/, "", section)
            print
            if (section == "boot" && !done) { print "systemd=true " mark; done = 1 }
            next
        }
        section == "boot" && tolower($0) ~ /^[ \t]*systemd[ \t]*=/ { print kept $0; next }
        { print }
        END { if (!done) { print "[boot] " mark; print "systemd=true " mark } }
    ' "$wsl_conf" >"$wsl_conf.new"
    cat "$wsl_conf.new" >"$wsl_conf"
    rm "$wsl_conf.new"
}

reset_systemd() {
    [ -e "$wsl_conf" ] || return 0
    awk -v mark="# $mark" -v kept="$kept" '
        index($0, mark) { next }
        index($0, kept) == 1 { print substr($0, length(kept) + 1); next }
        { print }
    ' "$wsl_conf" >"$wsl_conf.new"
    cat "$wsl_conf.new" >"$wsl_conf"
    rm "$wsl_conf.new"
    [ -s "$wsl_conf" ] || rm "$wsl_conf"
}

add_key() {
    file=$(keys_file)
    [ -n "$file" ] || { echo "there is no user in this distro yet: start it once" >&2; exit 1; }
    file=$root$file
    owner=$(awk -F: -v name="$(login_user)" '$1 == name { print $3 ":" $4; exit }' "$root/etc/passwd")
    folder=$(dirname "$file")
    if [ ! -d "$folder" ]; then
        mkdir -p "$folder"
        chmod 700 "$folder"
        chown "$owner" "$folder"
    fi
    [ -e "$file" ] || { : >"$file"; chmod 600 "$file"; chown "$owner" "$file"; }
    # A last line without an end would swallow the key.
    [ -z "$(tail -c 1 "$file")" ] || echo >>"$file"
    printf '%s %s\n' "$(printf '%s' "$key" | cut -d ' ' -f 1,2)" "$mark" >>"$file"
}

restart_server() { # a change of the port needs the socket as well, where systemd listens for sshd
    [ -d /run/systemd/system ] || return 0
    systemctl daemon-reload
    if systemctl is-enabled --quiet ssh.socket 2>/dev/null; then
        systemctl restart ssh.socket
    else
        systemctl enable --now ssh.service
        systemctl restart ssh.service
    fi
}

apply() {
    for what in $(lacking); do
        case $what in
            openssh-server)
                DEBIAN_FRONTEND=noninteractive apt-get update
                DEBIAN_FRONTEND=noninteractive apt-get install -y openssh-server
                ssh-keygen -A
                ;;
            settings)
                mkdir -p "$(dirname "$config")"
                wanted_config >"$config"
                ;;
            systemd) set_systemd ;;
            key) add_key ;;
        esac
    done
    restart_server
}

undo() {
    rm -f "$config"
    reset_systemd
    file=$root$(keys_file)
    if [ -f "$file" ] && grep -qF "$mark" "$file"; then
        # Written into the file itself, which keeps its owner and mode.
        rest=$(grep -vF "$mark" "$file" || true)
        if [ -n "$rest" ]; then printf '%s\n' "$rest" >"$file"; else : >"$file"; fi
    fi
    restart_server
}

main() {
    case $1 in
        state)
            lacking
            echo end
            ;;
        apply) apply ;;
        undo) undo ;;
        *)
            echo "usage: sshd.sh state|apply|undo PORT KEY" >&2
            exit 2
            ;;
    esac
}

# This script itself may come through stdin, of which no command may read.
main "$@" </dev/null
