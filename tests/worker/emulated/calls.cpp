// Calls functions of a library of kernels that another process requests on standard input. Both
// processes share memory.
//
//     calls LIBRARY MEMORY
//
// maps the file MEMORY and writes its address. For each line "name float integer..." it calls the
// function of this name, or the function to which the variable "*name" points, and writes a line.
// On 64-bit ARM a function with at most nine integers or addresses and one float may be called with
// more arguments than it has.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  const int file = open(arguments[2], O_RDWR);
  struct stat status;
  if (library == nullptr || file < 0 || fstat(file, &status) != 0) {
    std::cerr << (library == nullptr ? dlerror() : arguments[2]) << "\n";
    return 1;
  }
  void* memory = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  std::cout << reinterpret_cast<long>(memory) << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string name;
    float real = 0;
    long a[9] = {};
    words >> name >> real;
    for (long& integer : a) words >> integer;
    using Function = long (*)(long, long, long, long, long, long, long, long, float, long);
    const bool is_variable = name[0] == '*';
    void* found = dlsym(library, name.c_str() + is_variable);
    if (found == nullptr) return 2;
    const Function call = is_variable ? *static_cast<Function*>(found) : Function(found);
    std::cout << call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], real, a[8]) << std::endl;
  }
}
