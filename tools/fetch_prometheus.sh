#!/usr/bin/env bash
# Unpacks Prometheus and Alertmanager into a folder: fetch_prometheus.sh FOLDER [SUITE...]
#
# The packages come from the archive that this machine's apt already trusts, of the machine's own release or of the
# first SUITE that the archive serves. Nothing is installed: no root is needed, no service starts, no file outside
# FOLDER changes.
set -euo pipefail

folder=${1:?usage: fetch_prometheus.sh FOLDER [SUITE...]}
shift

for program in apt-get dpkg-deb awk tar; do
    if ! command -v "$program" >/dev/null; then
        echo "fetch_prometheus.sh: $program is missing; put prometheus, promtool, prometheus-alertmanager and amtool on" \
            "the PATH instead" >&2
        exit 1
    fi
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{own,other}/{lists,archives}/partial "$work"/{sources,packages,unpacked}

apt_in() { # apt_in own|other ARGUMENT...: apt-get with lists and cache below $work
    local place=$work/$1
    shift
    apt-get -qq -o Dir::State::Lists="$place/lists" -o Dir::Cache::Archives="$place/archives" \
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Debug::NoLocking=true \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=2 -o Acquire::http::Timeout=30 "${sources[@]}" "$@"
}

download() { # download own|other: the packages of that place; promtool is a package of its own since Debian 13
    local packages=(prometheus prometheus-alertmanager)
    if [[ -n $(apt_in "$1" indextargets --format '$(FILENAME)' 'Identifier: Packages' |
        xargs -r /usr/lib/apt/apt-helper cat-file | grep -x 'Package: promtool') ]]; then
        packages+=(promtool)
    fi
    (cd "$work/packages" && rm -f ./*.deb && apt_in "$1" download "${packages[@]}")
}

sources=()
# A third-party source that does not answer must not stand in the way of the archive that has the packages.
apt_in own update || true

if (($# == 0)); then
    download own
else
    # shellcheck disable=SC2016  # apt substitutes these, not the shell
    archive=$(apt_in own indextargets --format '$(REPO_URI)|$(CODENAME)|$(LABEL)' 'Identifier: Packages' |
        awk -F'|' '$3 == "Debian" && $2 !~ /-/ && !found {found = 1; print $1}')
    if [[ -z $archive ]]; then
        echo "fetch_prometheus.sh: this machine has no Debian archive to take the suites $* from" >&2
        exit 1
    fi
    sources=(-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources")
    fetched=
    for suite in "$@"; do
        printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$archive" "$suite" >"$work/sources/suite.sources"
        if apt_in other update && download other; then
            fetched=$suite
            break
        fi
    done
    if [[ -z $fetched ]]; then
        echo "fetch_prometheus.sh: the archive serves none of the suites $*" >&2
        exit 1
    fi
fi

for package in "$work"/packages/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work/unpacked" --strip-components=3 --wildcards './usr/bin/*'
done
for program in prometheus promtool prometheus-alertmanager amtool; do
    "$work/unpacked/$program" --version >/dev/null
done
mkdir -p "$folder"
mv "$work/unpacked"/* "$folder"/
"$folder/prometheus" --version 2>&1 | head -n 1
