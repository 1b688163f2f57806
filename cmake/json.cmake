# nlohmann_json: from the system, else from the Python package that pyproject.toml lists as a build
# requirement.
add_library(helm_json INTERFACE)
find_package(nlohmann_json QUIET)
if(nlohmann_json_FOUND)
  target_link_libraries(helm_json INTERFACE nlohmann_json::nlohmann_json)
else()
  find_package(Python COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(*u.find_spec('nlohmann_json').submodule_search_locations)"
    OUTPUT_VARIABLE helm_json_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(HELM_JSON_INCLUDE nlohmann/json.hpp HINTS ${helm_json_package}/include NO_DEFAULT_PATH)
  if(NOT HELM_JSON_INCLUDE)
    message(FATAL_ERROR "nlohmann_json was not found: install nlohmann-json3-dev, or "
                        "`pip install nlohmann-json` for ${Python_EXECUTABLE}")
  endif()
  target_include_directories(helm_json SYSTEM INTERFACE ${HELM_JSON_INCLUDE})
endif()
