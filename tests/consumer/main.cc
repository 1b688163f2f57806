// Generates greedily from a plan and a folder of weights: consumer PLAN FOLDER COUNT TOKEN...
// Prints the new tokens on one line.
#include <helm/generation.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: consumer PLAN FOLDER COUNT TOKEN...\n";
    return 2;
  }
  try {
    std::ifstream file(argv[1]);
    const std::string json{std::istreambuf_iterator<char>(file), {}};
    helm::EngineOptions options;
    options.directory = argv[2];
    helm::Engine engine(helm::Plan::from_json(json), options);

    helm::Request request;
    request.max_tokens = std::atoi(argv[3]);
    for (int i = 4; i < argc; ++i) request.prompt.push_back(std::atoi(argv[i]));
    helm::Generation generation(engine, {request});
    while (!generation.done()) {
      for (const helm::Token& token : generation.advance(0.05)) std::cout << token.id << ' ';
    }
    std::cout << '\n';
  } catch (const helm::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
