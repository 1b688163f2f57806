// Continues a prompt greedily: generate PLAN FOLDER COUNT TOKEN...
// PLAN is a file of `helm-llm plan MODEL --write PLAN`, FOLDER holds the model's weights. Tokens
// are numbers, as the model's tokenizer gives them; the new ones are printed on one line.
#include <helm/helm.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: generate PLAN FOLDER COUNT TOKEN...\n";
    return 2;
  }
  try {
    helm::EngineOptions options;
    options.directory = argv[2];
    helm::Engine engine(helm::Plan::from_file(argv[1]), options);

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
