package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Budgets in lines, tests apart.
const (
	functionLines = 80
	fileLines     = 500
	packageLines  = 2500
)

// Names that say nothing about what they name: of packages, and ends of type names.
var (
	vaguePackages = []string{"util", "utils", "common", "helper", "helpers", "manager", "misc", "base"}
	vagueTypes    = []string{"Info", "Base", "Manager", "Helper", "Util"}
)

func TestBudgets(t *testing.T) {
	for _, p := range mustList(t, "./...") {
		total := 0
		for _, name := range p.GoFiles {
			file := filepath.Join(p.Dir, name)
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, file, nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			if ast.IsGenerated(f) {
				continue
			}
			at := short(p.ImportPath) + "/" + name
			lines := fset.File(f.Pos()).LineCount()
			total += lines
			if lines > fileLines {
				t.Errorf("%s has %d lines, more than %d: split it by topic", at, lines, fileLines)
			}
			checkDeclarations(t, fset, f, at)
		}
		if total > packageLines {
			t.Errorf("package %s has %d lines, more than %d: it does more than one thing", short(p.ImportPath), total, packageLines)
		}
	}
}

// checkDeclarations reports long functions, init, and types with vague names.
func checkDeclarations(t *testing.T, fset *token.FileSet, f *ast.File, at string) {
	t.Helper()
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil && d.Name.Name == "init" {
				t.Errorf("%s has an init: what happens at start is written in main, in order", at)
			}
			if n := fset.Position(d.End()).Line - fset.Position(d.Pos()).Line + 1; n > functionLines {
				t.Errorf("%s: %s has %d lines, more than %d", at, d.Name.Name, n, functionLines)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if ts, ok := s.(*ast.TypeSpec); ok && ts.Name.IsExported() && vague(ts.Name.Name, vagueTypes) {
					t.Errorf("%s: the type name %s says nothing about its content", at, ts.Name.Name)
				}
			}
		}
	}
}

func vague(name string, endings []string) bool {
	return slices.ContainsFunc(endings, func(e string) bool { return strings.HasSuffix(name, e) })
}

func TestPackagesSayWhatTheyAre(t *testing.T) {
	for _, p := range mustList(t, "./...") {
		if p.Doc == "" && len(p.GoFiles) > 0 {
			t.Errorf("package %s has no package comment", short(p.ImportPath))
		}
		if slices.Contains(vaguePackages, path.Base(p.ImportPath)) {
			t.Errorf("the package name %s says nothing about its content", short(p.ImportPath))
		}
	}
}
