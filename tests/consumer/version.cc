// Prints the version of the headers, as text and as numbers, and that of the library.
#include <helm/helm.h>

#include <iostream>

int main() {
  std::cout << HELM_VERSION << ' ' << HELM_VERSION_MAJOR << '.' << HELM_VERSION_MINOR << '.'
            << HELM_VERSION_PATCH << ' ' << helm::version() << '\n';
}
