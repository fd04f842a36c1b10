# Writes a C file with the commit that a run file names; "-dirty" if tracked files differ, "unknown" outside of a checkout. Run at every build; the file is
# touched when its content changes. cmake -DROOT=folder -DOUT=file -P revision.cmake
cmake_minimum_required(VERSION 3.22)
execute_process(COMMAND git describe --always --dirty --abbrev=12 WORKING_DIRECTORY ${ROOT} OUTPUT_VARIABLE revision
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
# A copy without its own history, unpacked somewhere in another checkout, is not of that one's commit.
execute_process(COMMAND git rev-parse --show-prefix WORKING_DIRECTORY ${ROOT} OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(failed OR prefix)
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "extern const char kvl_revision[];\nconst char kvl_revision[] = \"${revision}\";\n")
