# HELM's version, which pyproject.toml alone says: helm_version as it stands there, helm_version_number
# without what follows the third number.
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml helm_version REGEX "^version = ")
string(REGEX REPLACE "^version = \"([^\"]*)\".*" "\\1" helm_version "${helm_version}")
if(NOT helm_version MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+")
  message(FATAL_ERROR "pyproject.toml says version \"${helm_version}\"; expected three numbers, such as 0.1.0")
endif()
set(helm_version_number ${CMAKE_MATCH_0})
