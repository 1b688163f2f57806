# The C++ files of a folder as one: most of the time goes into headers that all of them include.
# Outside of wheels, developers compile file by file, so that a change compiles one.
set(helm_unity_default OFF)
if(SKBUILD)
  set(helm_unity_default ON)
endif()
option(HELM_UNITY "Compile the C++ files of a folder together" ${helm_unity_default})

# helm_unite(target [file...]): the target's files but for those, and for those that have compile
# options of their own.
function(helm_unite target)
  if(NOT HELM_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "[.]cc$")
  list(REMOVE_ITEM sources ${ARGN})
  foreach(source IN LISTS sources)
    get_filename_component(folder ${source} DIRECTORY)
    get_filename_component(folder ${folder} NAME)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
