# The installed CMake package: find_package(helm) gives helm::helm.
include(CMakePackageConfigHelpers)

set(helm_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/helm)
if(SKBUILD)
  set(helm_namelink NAMELINK_SKIP)  # a wheel would hold the library twice
endif()
install(TARGETS helm EXPORT helmTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${helm_namelink})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/cpp/include/helm ${helm_generated}/helm
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT helmTargets NAMESPACE helm:: DESTINATION ${helm_cmake_dir})
file(WRITE ${PROJECT_BINARY_DIR}/helmConfig.cmake
     "include(\"\${CMAKE_CURRENT_LIST_DIR}/helmTargets.cmake\")\n")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/helmConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/helmConfig.cmake ${PROJECT_BINARY_DIR}/helmConfigVersion.cmake
        DESTINATION ${helm_cmake_dir})
