#!/usr/bin/env bash
# The command line as a user meets it: help of every command, exit codes, "did you mean", ranges, completion.
# Called with the program and the project's root. What is legal is read from --help, so new commands are covered by themselves.
set -uo pipefail
kvlab=$1
failures=0

fail() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# expect CODE PATTERN ARGUMENT...: the exit code, and stdout and stderr together matching the pattern.
expect() {
    local code=$1 pattern=$2 out got
    shift 2
    out=$("$kvlab" "$@" 2>&1 </dev/null)
    got=$?
    [[ $got -eq $code ]] || fail "kvlab $*: exit code $got instead of $code: $out"
    # shellcheck disable=SC2053
    [[ $out == $pattern ]] || fail "kvlab $*: \"$out\" is not \"$pattern\""
}

# ---- the commands, and help of each ----
mapfile -t commands < <("$kvlab" --help | sed -n '/^commands/,/^$/s/^  \([a-z]\+\( [a-z]\+\)\?\)  .*/\1/p')
for name in devices plan plugins check tokenize generate "eval ppl" "eval kld" "eval stream" bench "log show" "log repair" completion help; do
    [[ " $(printf '%s, ' "${commands[@]}")" == *" $name, "* ]] || fail "kvlab --help does not list \"$name\""
done
expect 0 "kvlab [0-9]*.[0-9]*.[0-9]*" --version
for topic in "exit codes" environment "options of every command"; do expect 0 "*$topic:*" --help; done

for name in "${commands[@]}"; do
    read -ra words <<<"$name"
    expect 0 "kvlab $name: *usage: kvlab $name*options:*--help*--plugin*" "${words[@]}" --help
    expect 0 "kvlab $name: *" help "${words[@]}"
    longest=$("$kvlab" "${words[@]}" --help | sed '/^$/,$!d' | sed -n '/^options/,/^$/p' | wc -L)
    ((longest <= 100)) || fail "kvlab $name --help: a line of $longest columns"
    twice=$("$kvlab" "${words[@]}" --help | sed -n '/^options/,/^$/s/^  \(    \|\(-[a-z]\), \)\(--[a-z0-9-]*\).*/\2\n\3/p' | grep . | sort | uniq -d)
    [[ -z $twice ]] || fail "kvlab $name has two options $twice"
    expect 2 "kvlab: error: unknown option --quiex; did you mean --quiet[?]" "${words[@]}" --quiex
    expect 2 "kvlab: error: unknown option --nonesuch; kvlab $name --help*" "${words[@]}" --nonesuch
    expect 2 "kvlab: error: option --quiet takes no value" "${words[@]}" --quiet=1
    expect 2 "kvlab: error: option --quiet is given twice" "${words[@]}" --quiet --quiet
    expect 2 "kvlab: error: option --plugin needs a value*" "${words[@]}" --plugin

    # Values outside every range and choice that the help shows; required options left out.
    help=$("$kvlab" "${words[@]}" --help | sed -n '/^options/,/^$/p' | awk '/^  (-., |    )--/ {if (line) print line; line = $0; next} {sub(/^ +/, ""); line = line " " $0} END {print line}')
    number='-?[0-9.e+-]+'
    while IFS= read -r line; do
        [[ $line =~ --([a-z0-9-]+) ]] || continue
        option=--${BASH_REMATCH[1]}
        if [[ $line =~ [\(\ ]($number)\ to\ ($number)[\;\)] ]]; then
            low=${BASH_REMATCH[1]} high=${BASH_REMATCH[2]}
            expect 2 "kvlab: error: option $option: wanted *, $low to $high, found *" "${words[@]}" "$option=$(awk "BEGIN {printf \"%.0f\", $low - 1}")"
            expect 2 "kvlab: error: option $option: wanted *, $low to $high, found *" "${words[@]}" "$option=$(awk "BEGIN {printf \"%.0f\", $high + 1}")"
            expect 2 "kvlab: error: option $option: wanted *" "${words[@]}" "$option=${high}x"
        elif [[ $line =~ [\(\ ]at\ least\ ($number)[\;\)] ]]; then
            expect 2 "kvlab: error: option $option: wanted *at least*" "${words[@]}" "$option=$(awk "BEGIN {printf \"%.0f\", ${BASH_REMATCH[1]} - 1}")"
        elif [[ $line == *"(one of "* || $line =~ --[a-z0-9-]+\ [^\ ]+\|[^\ ]+\  ]]; then
            expect 2 "kvlab: error: option $option: wanted *|*, found \"nonesuch\"" "${words[@]}" "$option=nonesuch"
        fi
        if [[ $line == *required\)* ]]; then
            expect 2 "kvlab: error: kvlab $name needs --*" "${words[@]}"
        fi
    done <<<"$help"
done

# ---- commands that are none ----
expect 2 "kvlab: error: a command is missing*"
expect 2 'kvlab: error: unknown command "devcies"; did you mean "devices"[?]' devcies
expect 2 'kvlab: error: unknown command "evla"; did you mean "eval ppl"[?]' evla ppl
expect 2 'kvlab: error: unknown command "nonesuch"; kvlab --help*' nonesuch
expect 2 'kvlab: error: kvlab eval is one of several commands: eval ppl, *' eval
expect 0 'kvlab log is several commands*log show *what a run file says*log export *' log --help
expect 0 'kvlab eval is several commands*eval ppl *eval stream *' help eval
expect 2 'kvlab: error: kvlab log is one of several commands: *log show*' log nonesuch
expect 2 'kvlab: error: the command comes first*' --quiet devices
expect 2 'kvlab: error: kvlab devices takes only options, found "x"' devices x
expect 1 'kvlab: error: *nonesuch.so*' completion bash --plugin ./nonesuch.so

# ---- errors of stdout and of its reader ----
"$kvlab" --help >/dev/full 2>/dev/null
[[ $? -eq 1 ]] || fail "kvlab --help >/dev/full must end with exit code 1"
[[ -z $("$kvlab" nonesuch 2>/dev/null) ]] || fail "an error must not write to stdout"

# ---- completion ----
for shell in bash zsh fish; do
    script=$("$kvlab" completion "$shell") || fail "kvlab completion $shell"
    if command -v "$shell" >/dev/null; then "$shell" -n <<<"$script" || fail "$shell does not accept its completion script"; fi
    for name in "${commands[@]}"; do [[ $script == *"${name##* }"* ]] || fail "completion $shell does not know $name"; done
done
expect 2 "kvlab: error: kvlab completion: wanted one shell*" completion tcsh
expect 2 "kvlab: error: kvlab completion: wanted one shell*" completion

# shellcheck disable=SC1090
source <("$kvlab" completion bash)
# completes EXPECTED WORD...: what pressing tab after the words offers contains EXPECTED.
completes() {
    local expected=$1
    shift
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _kvlab
    [[ " ${COMPREPLY[*]} " == *" $expected "* ]] || fail "tab after \"$*\" offers \"${COMPREPLY[*]}\" and not $expected"
}
completes devices kvlab dev
completes eval kvlab e
completes ppl kvlab eval ""
completes --plugin kvlab eval ppl --pl
completes --quiet kvlab devices --
completes fish kvlab completion f

((failures == 0)) || exit 1
echo "cli: ${#commands[@]} commands checked"
