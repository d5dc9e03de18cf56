#!/usr/bin/env bash
# Gather a text of some 21 MB that everybody can install: the documentation of Linux, of Debian's package
# linux-doc (its .rst files, technical English). Nothing is installed; apt-get and dpkg are needed.
#   bash batch/linux_doc.sh FOLDER [linux-doc-6.1=6.1.192-2]
# writes FOLDER/train.txt and FOLDER/test.txt, every twentieth file for testing. Another version is another text. One that
# Debian's servers have no more is at snapshot.debian.org, as a line of sources.list.
set -euo pipefail

out=${1:?usage: bash batch/linux_doc.sh FOLDER [PACKAGE=VERSION]}
wanted=${2:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

if [[ -z $wanted ]]; then
    wanted=$(apt-cache depends linux-doc | sed -n 's/.*Depends: \(linux-doc-[0-9.]*\)$/\1/p' | head -n 1)
fi
apt-get download -qq "${wanted:?apt-get update knows no linux-doc}"
package=${wanted%%=*}
dpkg -x "$package"_*.deb unpacked
version=$(dpkg-deb -f "$package"_*.deb Version)

# In the order of a hash of their names: the same everywhere, and subjects lie spread over what is trained on, held out
# (the end of what is trained on) and tested. Translations are other languages.
number=0
rm -f "$out/train.txt" "$out/test.txt"
find unpacked -name '*.rst.gz' -not -path '*/translations/*' | LC_ALL=C sort \
    | while read -r name; do echo "$(md5sum <<<"$name" | cut -c1-32) $name"; done | LC_ALL=C sort >names
while read -r _ name; do
    part=train
    if ((++number % 20 == 0)); then part=test; fi
    zcat "$name" >>"$out/$part.txt"
done <names
echo "$package $version: $number files, $(wc -c <"$out/train.txt") bytes to train on, $(wc -c <"$out/test.txt") to test on"
(cd "$out" && sha256sum train.txt test.txt)
