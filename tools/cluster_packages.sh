#!/usr/bin/env bash
# Unpack the servers that `make test-cluster` starts, and skopeo, into FOLDER/root: Debian packages, nothing is installed, no root needed.
#
#   tools/cluster_packages.sh FOLDER
#
# Where the package lists of this machine are missing or too old, own ones are fetched into FOLDER/apt.
set -euo pipefail

SLURM=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 libibverbs1 libnl-3-200
    libnl-route-3-200)
SLURM_PROGRAMS=(usr/sbin/munged usr/sbin/slurmctld-wlm usr/sbin/slurmd-wlm usr/sbin/slurmstepd-wlm usr/bin/sbatch usr/bin/srun
    usr/bin/scontrol usr/bin/squeue usr/bin/scancel usr/bin/sinfo)

# Postgres is started from here too; the libraries are those that a small container image lacks.
POSTGRES=(postgresql-15 postgresql-client-15 libpq5 libicu72 libldap-2.5-0 libsasl2-2 libxml2 libgssapi-krb5-2 libkrb5-3
    libk5crypto3 libkrb5support0 libkeyutils1 libpam0g)
POSTGRES_PROGRAMS=(usr/lib/postgresql/15/bin/{initdb,postgres,pg_isready,createdb,psql,pg_dump,pg_restore})

# The judge of bundles: it reads OCI layouts.
SKOPEO=(skopeo libgpgme11 libassuan0 libdevmapper1.02.1)
SKOPEO_PROGRAMS=(usr/bin/skopeo)

# Another service adds its packages here, and the programs of which all libraries must be found.
PACKAGES=("${SLURM[@]}" "${POSTGRES[@]}" "${SKOPEO[@]}")
PROGRAMS=("${SLURM_PROGRAMS[@]}" "${POSTGRES_PROGRAMS[@]}" "${SKOPEO_PROGRAMS[@]}")

folder=$(realpath -m "${1:?usage: tools/cluster_packages.sh FOLDER}")
mkdir -p "$folder/packages"
cd "$folder"

fail() {
    echo "tools/cluster_packages.sh: $*" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "expected apt-get: the servers are unpacked from Debian's packages (found none on this system)"
APT=(apt-get --quiet=2 -o APT::Sandbox::User="$(id -un)")

download() (
    cd packages
    "$@" download "${PACKAGES[@]}"
)

if ! download "${APT[@]}" 2>apt.log; then
    mkdir -p apt/lists/partial apt/cache/archives/partial
    OWN=("${APT[@]}" -o Dir::State::Lists="$folder/apt/lists" -o Dir::Cache="$folder/apt/cache")
    { "${OWN[@]}" update && download "${OWN[@]}"; } 2>>apt.log \
        || fail "apt-get cannot fetch ${PACKAGES[*]}: $(tail -n 3 apt.log)"
fi

rm -rf root.new
for package in packages/*.deb; do
    dpkg -x "$package" root.new || fail "cannot unpack $package"
done
rm -rf root packages apt apt.log
mv root.new root

libraries="$folder/root/usr/lib/$(uname -m)-linux-gnu"
for program in "${PROGRAMS[@]}"; do
    test -x "root/$program" || fail "expected $program in the packages (another release of Debian?)"
    missing=$(LD_LIBRARY_PATH="$libraries:$libraries/slurm-wlm:$folder/root/lib/$(uname -m)-linux-gnu" ldd "root/$program" | awk '/not found/ {print $1}' | sort -u)
    test -z "$missing" || fail "$program needs libraries that are neither installed nor unpacked: ${missing//$'\n'/ }"
done
